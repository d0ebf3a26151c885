"""What operators of self-attention lose and save, layer by layer and phase by phase, and which to take."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch

from ..attention import Agents, Downsample, Merge, Operator
from ..cache.conditional import sample_of
from ..hosts.models import Site
from ..patch import apply_agentsd
from ..recipe import Recipe
from ..schedule import Phases, Schedule
from .cost import Cost, cost_of
from .losses import Losses, mean_square
from .recording import Call, standing_in

OPERATORS: tuple[Operator, ...] = (
    Downsample(at_most=None),
    Merge(0.5, ranking="layer"),
    Agents(0.25, at_most=None, agent_ratio=0.95, ranking="layer"),
)
"""What is tried beside full attention, in each layer and phase; layers rank their own tokens."""


GRAIN = 1e-3
"""Share of a computed step's cost that an operator saves at least, else it is not tried."""


class Effect(NamedTuple):
    """What an operator does in one layer.

    Attributes:
        loss: mean square of the change of a call's guided output.
        saved: share of a computed step's cost.
    """

    loss: float
    saved: float


@dataclass(frozen=True)
class Choice:
    """What the layers run in a phase; those not named run full attention.

    Attributes:
        loss: mean square of the change of a call's guided output, as if the layers' losses added up.
        computed, cached: shares of a computed step's cost that it saves in a computed step, and in a cached
            one.
        does: operators by layer.
    """

    loss: float = 0.0
    computed: float = 0.0
    cached: float = 0.0
    does: Mapping[str, Operator] = field(default_factory=dict)


def cost_of_layers(unet: Any, sites: Sequence[Site], call: Call, cost: Cost) -> dict[str, float]:
    """What each layer costs in a call, by its name."""
    return _metered(unet, sites, call, cost)[1]


def try_operator(
    unet: Any, site: Site, operator: Operator, call: Call, losses: Losses, cost: Cost
) -> tuple[float, float]:
    """(mean square of the change of a call's guided output, what the layer costs) with an operator in it."""
    with apply_agentsd(unet, recipe=Recipe(layers={site.name: operator})):
        output, spent = _metered(unet, [site], call, cost)
    return mean_square(losses.guided(sample_of(output) - call.sample)), spent[site.name]


@torch.no_grad()
def _metered(unet: Any, sites: Sequence[Site], call: Call, cost: Cost) -> tuple[Any, dict[str, float]]:
    """What the U-Net gives, and what each of these layers costs."""
    spent: dict[str, float] = {}

    def forward(name: str, host: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        outputs: list[Any] = []
        spent[name] = cost_of(cost, unet.device, lambda: outputs.append(host(*args, **kwargs)))
        return outputs[0]

    with ExitStack() as stack:
        for site in sites:
            stack.enter_context(standing_in(site.attn, partial(forward, site.name)))
        return unet(**call.given), spent


def choices_of(
    effects: Mapping[str, Mapping[Operator, Effect]], cached: Callable[[str], bool], most: int
) -> list[Choice]:
    """For some prices of a loss, what the layers run together; baseline first, then the more saved.

    At a price each layer takes what loses least less the price of what it saves. So no other combination of
    as much saving loses less, as far as losses and savings add up.

    Args:
        effects: of operators by layer.
        cached: whether a cached step computes a layer.
        most: how many choices, at most.
    """
    edges = sorted(
        (edge for name, tried in effects.items() for edge in _edges(name, tried)), key=lambda edge: edge[0]
    )
    taken: dict[str, tuple[Operator, Effect]] = {}
    found = [Choice()]
    for _, name, operator, effect in edges:
        taken[name] = operator, effect
        found.append(
            Choice(
                sum(effect.loss for _, effect in taken.values()),
                sum(effect.saved for _, effect in taken.values()),
                sum(effect.saved for name, (_, effect) in taken.items() if cached(name)),
                {name: operator for name, (operator, _) in taken.items()},
            )
        )
    return _spread(found, most)


def _edges(name: str, tried: Mapping[Operator, Effect]) -> Iterator[tuple[float, str, Operator, Effect]]:
    """Of a layer's lower hull of loss over what is saved, from baseline on: slope, and where the edge
    ends."""
    here = Effect(0.0, 0.0)
    while ahead := {o: e for o, e in tried.items() if e.saved > max(here.saved, GRAIN)}:

        def slope(operator: Operator, start: Effect = here, ahead: Any = ahead) -> tuple[float, float]:
            loss, saved = ahead[operator]
            return (loss - start.loss) / (saved - start.saved), -saved

        operator = min(ahead, key=slope)
        yield slope(operator)[0], name, operator, ahead[operator]
        here = ahead[operator]


def _spread(choices: Sequence[Choice], most: int) -> list[Choice]:
    """So many of them at most, evenly by what they save, the first and the last among them."""
    wanted = [choices[-1].computed * i / (most - 1) for i in range(most)]
    near = {min(range(len(choices)), key=lambda i: abs(choices[i].computed - share)) for share in wanted}
    return [choices[i] for i in sorted(near)]


def layers_of(chosen: Mapping[bool, Choice], early_frac: float) -> dict[str, Schedule]:
    """What each layer runs that is not baseline in both phases; `chosen` has the early phase under True."""
    layers: dict[str, Schedule] = {}
    early, late = ((chosen.get(phase) or Choice()).does for phase in (True, False))
    for name in dict.fromkeys([*early, *late]):
        does = early.get(name), late.get(name)
        if does[0] != does[1]:
            layers[name] = Phases(*does, early_frac)
        elif does[0] is not None:
            layers[name] = does[0]
    return layers
