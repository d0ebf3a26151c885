"""Whole runs of a pipeline beside stock's: what they cost, and how far their latents end from stock's."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..patch import apply_agentsd
from ..recipe import Recipe
from ..reuse.halves import with_sample
from .cost import Cost, cost_of
from .losses import Losses, mean_square
from .recording import Call, standing_in


class Figures(NamedTuple):
    """What runs under a recipe, or of fewer steps, gain and lose.

    Attributes:
        speedup: cost of stock's U-Net calls over theirs.
        distance: root mean square of the change of the final latents, over that of stock's latents.
        calls: what the U-Net's calls of the last run were, a symbol each; empty without a recipe.
    """

    speedup: float
    distance: float
    calls: str


class Runs:
    """Runs a pipeline on prompts; the i-th starts from the noise of `seed + i`.

    Args:
        pipe: the pipeline.
        unet: its U-Net.
        cost: what is counted.
        prompts: one for each run.
        seed: of the first run.
        settings: of the pipeline's call.
    """

    def __init__(
        self, pipe: Any, unet: Any, cost: Cost, prompts: Sequence[str], seed: int, settings: dict[str, Any]
    ) -> None:
        self._pipe, self._unet, self._cost = pipe, unet, cost
        self.prompts, self._seed, self._settings = prompts, seed, settings
        self.stock: list[Tensor] = []
        self.spent = 0.0

    @property
    def power(self) -> float:
        """Sum of the mean squares of stock's final latents."""
        return sum(map(mean_square, self.stock))

    def run(self, number: int, **changes: Any) -> Tensor:
        """(B, C, H, W) the final latents of a prompt's run."""
        rng = torch.Generator().manual_seed(self._seed + number)
        settings = self._settings | changes
        latents: Tensor = self._pipe(self.prompts[number], generator=rng, output_type="latent", **settings)[0]
        return latents

    def metered(self, number: int, run: Callable[[], Tensor]) -> tuple[Tensor, list[float]]:
        """What `run` returns, and what each U-Net call cost; multiply-adds are counted on the first alone."""
        spent: list[float] = []
        if self._cost == "multiply_adds" and number:
            return run(), []

        def forward(host: Any, *args: Any, **kwargs: Any) -> Any:
            outputs: list[Any] = []
            device = self._unet.device
            spent.append(cost_of(self._cost, device, lambda: outputs.append(host(*args, **kwargs))))
            return outputs[0]

        with standing_in(self._unet, forward):
            return run(), spent

    def compare(self, recipe: Recipe | None, tick: Callable[[], None], **changes: Any) -> Figures:
        """Run all prompts under a recipe, or with changed settings, and compare them with stock's runs."""
        spent = moved = 0.0
        symbols = ""
        with nullcontext() if recipe is None else apply_agentsd(self._pipe, recipe=recipe) as handle:
            for number, stock in enumerate(self.stock):
                latents, costs = self.metered(number, lambda n=number: self.run(n, **changes))  # type: ignore[misc]
                spent += sum(costs)
                moved += mean_square(latents.float() - stock.float())
                tick()
            if handle is not None:
                symbols = handle.summary().split()[0]
        return Figures(self.spent / spent, math.sqrt(moved / self.power), symbols)

    def weigh(
        self, losses: Losses, calls: list[Call], changes: dict[int, Tensor], tick: Callable[[], None]
    ) -> list[float]:
        """How much the final latents' mean square moves for each unit of a step's loss.

        Not a formula of the noise levels: how far an error at a step carries depends on the sampler and on
        what the model makes of it afterwards. So the first run is made again with one call's output changed
        as a cheap call changes it, at a few steps; between these the weight's logarithm is a line.

        Args:
            losses: what a change loses.
            calls: the first run's.
            changes: (B, C, H, W) of the prediction, by the call's place in the run.
            tick: called after each run.
        """
        weights: dict[int, float] = {}
        for place, change in changes.items():
            moved = mean_square(self._changed_run(calls, place, change).float() - self.stock[0].float())
            lost = mean_square(losses.guided(change))
            if moved and lost:
                weights[calls[place].step] = moved / lost
            tick()
        return [_between(weights, step) for step in range(calls[-1].step + 1)]

    def _changed_run(self, calls: list[Call], place: int, change: Tensor) -> Tensor:
        """The first run; its calls up to that place are not computed again."""
        made = 0

        def forward(host: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal made
            call = calls[made] if made <= place else None
            made += 1
            if call is None:
                return host(*args, **kwargs)
            sample = call.sample.clone() if made <= place else call.sample + change
            return with_sample(call.output, sample)

        with standing_in(self._unet, forward):
            return self.run(0)


def _between(weights: dict[int, float], step: int) -> float:
    """The weight of a step, on the line through the logarithms of its neighbours', or the nearest one's."""
    if not weights:
        return 1.0
    below = max((s for s in weights if s <= step), default=min(weights))
    above = min((s for s in weights if s >= step), default=max(weights))
    share = (step - below) / (above - below) if above > below else 0.0
    share = min(max(share, 0.0), 1.0)
    return math.exp((1 - share) * math.log(weights[below]) + share * math.log(weights[above]))
