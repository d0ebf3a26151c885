"""Find, on a user's own model and prompts, what each self-attention layer should run in each phase."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from ..attention import Agents, Downsample, Merge, Operator
from ..hosts import EVERY_LEVEL, Site, find_sites
from ..patch import apply_agentsd
from ..recipe import FAST, Phases, Recipe, Schedule
from .cost import Cost
from .goal import check_cost, check_goal, check_prompts, free_unet
from .replay import Figures, Meter, is_guided, record_calls

OPERATORS: tuple[Operator, ...] = (
    Downsample(at_most=None),
    *(Merge(ratio, ranking="layer") for ratio in (0.25, 0.5, 0.7)),
    *(Agents(ratio, at_most=None, agent_ratio=0.95, ranking="layer") for ratio in (0.0, 0.25, 0.5)),
)
"""What is tried beside stock attention, in each layer and phase; layers rank their own tokens."""

GRAIN = 5e-4
"""Share of a U-Net call's cost to which the search rounds what an operator saves."""

Key = tuple[str, bool]
"""A layer's name, and whether it is the early phase."""
Table = dict[Key, dict[Operator | None, Figures]]
Picked = dict[Key, Operator | None]


def calibrate(
    pipe: Any,
    prompts: Sequence[str],
    *,
    speedup: float | None = None,
    max_error: float | None = None,
    cost: Cost = "time",
    base: Recipe = FAST,
    operators: Sequence[Operator] = OPERATORS,
    num_inference_steps: int = 50,
    guidance_scale: float = 7.5,
    calls: int = 6,
    seed: int = 0,
    on_step: Callable[[int, int], None] | None = None,
    **call_kwargs: Any,
) -> Recipe:
    """Choose stock attention or an operator for each layer and phase of a U-Net.

    Each operator is tried in each layer alone, on recorded calls of unpatched runs. As if errors and savings
    added up, the whole settings of least error are found for every saving; of these the one that meets the
    goal, measured as a whole, with the least error (or the most saved) is returned.

    Args:
        pipe: a diffusers text-to-image pipeline (or another that takes prompts first) with a `unet` that is
            not compiled yet; it is left as it was.
        prompts: what to record; a handful that is like the prompts to come.
        speedup: the goal: the mean cost of a U-Net call over what it is to be; more than 1.
        max_error: or the goal: the largest `Figures.error`.
        cost: what counts as cost: "time" (CPU seconds; on a GPU seconds) or "multiply_adds" (exact).
        base: the recipe that is compared with; its `early_frac` is kept.
        operators: what is tried, with settings of their own.
        num_inference_steps, guidance_scale, call_kwargs: of the pipeline's call.
        calls: how many U-Net calls of each prompt's run are recorded, evenly spread.
        seed: the first prompt's; the i-th has seed + i.
        on_step: told how many of how many trials are done.

    Returns:
        A recipe by layers, for `apply_agentsd(pipe, recipe=...)`. `measured` has their "error" and "speedup"
        on the recorded calls, the same of "base" as it stands, and what they were measured on.

    Raises:
        TypeError: `pipe` is no pipeline with a U-Net.
        ValueError: an argument is out of range, the U-Net is patched or compiled, there is not exactly one
            goal, or nothing meets it; the message says what can be had.
    """
    check_goal(speedup=speedup, max_error=max_error)
    _check_arguments(prompts, calls, cost, base, operators)
    early_frac = base.timing.early_frac if isinstance(base.timing, Phases) else 0.0
    unet = _free_layers(pipe)
    settings = {"num_inference_steps": num_inference_steps, "guidance_scale": guidance_scale, **call_kwargs}
    recorded = record_calls(pipe, unet, early_frac, prompts, calls, seed, settings)
    meter = Meter(unet, cost, recorded, guidance_scale if is_guided(pipe, guidance_scale) else 1.0)
    stock = meter.whole(None).cost
    table = _try_each(meter, operators, base.seed, on_step)
    picks = _best_by_saving(table, GRAIN * stock)
    wholes = [_recipe(picked, early_frac, base.seed) for picked in picks]

    @cache
    def measured(place: int) -> tuple[float, float]:
        error, spent = meter.whole(wholes[place])
        return error, stock / spent

    place = _meeting(measured, len(wholes), speedup, max_error)
    error, gained = measured(place)
    fixed = meter.whole(base)
    figures = {
        "error": error,
        "speedup": gained,
        "base": {"error": fixed.error, "speedup": stock / fixed.cost},
        "cost": cost,
        "calls": len(recorded),
        "steps": num_inference_steps,
        "guidance_scale": guidance_scale,
        "prompts": list(prompts),
    }
    return replace(wholes[place], measured=figures)


def _meeting(
    measured: Callable[[int], tuple[float, float]],
    count: int,
    speedup: float | None,
    max_error: float | None,
) -> int:
    """Which of `count` whole settings meets the goal; the later the faster, and the greater their error.

    By bisection: where the measured figures are out of order, it is still one that was seen to meet the goal.
    """
    if speedup is not None:
        place = bisect_left(range(count), speedup, key=lambda i: measured(i)[1])
    else:
        place = bisect_right(range(count), max_error or 0.0, key=lambda i: measured(i)[0]) - 1
    if 0 <= place < count:
        return place
    goal = f"speedup={speedup}" if speedup is not None else f"max_error={max_error}"
    had = "nothing saves anything"
    if count:
        (error, _), (_, gained) = measured(0), measured(count - 1)
        had = f"the least error is {error:.2g}, the greatest speedup {gained:.3f}"
    raise ValueError(f"{goal} cannot be met on this model at this size: {had}")


def _check_arguments(
    prompts: Sequence[str], calls: int, cost: str, base: Recipe, operators: Sequence[Operator]
) -> None:
    check_prompts(prompts)
    if calls < 1:
        raise ValueError(f"calls={calls}: pass 1 or more, for instance 6")
    check_cost(cost)
    if not isinstance(base, Recipe) or base.attention is None or not isinstance(base.timing, Phases | None):
        raise ValueError(f"base={base!r}: pass a recipe with attention, in phases or in every step")
    if base.steps is not None or base.guidance is not None:
        raise ValueError(
            f"base={base!r}: calls are tried one by one and in whole; leave its steps and guidance out, and "
            "give them to what is found (dataclasses.replace)"
        )
    if not operators or not all(isinstance(operator, Operator) for operator in operators):
        raise ValueError(f"operators={operators!r}: pass a list of operators, as [Downsample(), Agents()]")
    if trained := [operator for operator in [*base.operators, *operators] if operator.needs_core]:
        raise ValueError(f"{trained[0]!r} is to be trained: only what runs without training is calibrated")


def _free_layers(pipe: Any) -> Any:
    """The pipeline's U-Net, if every layer of it can be patched."""
    unet = free_unet(pipe)
    every = {site.name: Downsample() for site in find_sites(unet, EVERY_LEVEL, at_most=True)}
    apply_agentsd(unet, recipe=Recipe(layers=every)).remove()  # raises what it would raise later
    return unet


def _try_each(
    meter: Meter, operators: Sequence[Operator], seed: int, on_step: Callable[[int, int], None] | None
) -> Table:
    """What each operator loses and costs in each layer and phase; the first is stock attention."""
    sites: list[Site] = find_sites(meter.unet, EVERY_LEVEL, at_most=True)
    trials = [
        (site, early, operator) for early in meter.phases for site in sites for operator in (None, *operators)
    ]
    table: Table = {}
    for done, (site, early, operator) in enumerate(trials):
        recipe = None if operator is None else Recipe(layers={site.name: operator}, seed=seed)
        figures = meter.phase(recipe, early, site.attn)
        table.setdefault((site.name, early), {})[operator] = figures
        if on_step is not None:
            on_step(done + 1, len(trials))
    return table


def _recipe(picked: Picked, early_frac: float, seed: int) -> Recipe:
    """What each layer runs that is not stock in both phases."""
    layers: dict[str, Schedule] = {}
    for name in dict.fromkeys(name for name, _ in picked):
        early, late = (picked.get((name, phase)) for phase in (True, False))
        if early != late:
            layers[name] = Phases(early, late, early_frac)
        elif early is not None:
            layers[name] = early
    return Recipe(layers=layers, seed=seed)


def _best_by_saving(table: Table, grain: float) -> list[Picked]:
    """Whole choices, by what they save: of all that save as much or more, each has the least error.

    A dynamic program over the layers and phases; errors add up, and savings, in units of `grain`.
    """
    best: dict[int, tuple[float, tuple[Operator | None, ...]]] = {0: (0.0, ())}
    for tried in table.values():
        stock = tried[None]
        ways = [(round((stock.cost - cost) / grain), error, does) for does, (error, cost) in tried.items()]
        found: dict[int, tuple[float, tuple[Operator | None, ...]]] = {}
        for saved, (error, picked) in best.items():
            for gain, added, operator in ways:
                place, total = saved + gain, error + added
                if place not in found or total < found[place][0]:
                    found[place] = total, (*picked, operator)
        best = found
    frontier: list[Picked] = []
    least = math.inf
    for saved in sorted((saved for saved in best if saved > 0), reverse=True):
        error, operators = best[saved]
        if error < least:
            least = error
            frontier.append(dict(zip(table, operators, strict=True)))
    return frontier[::-1]
