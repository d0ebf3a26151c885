"""Whole runs of a pipeline, beside the baseline's: their cost, and how far from it their latents end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from statistics import geometric_mean
from typing import Any, Literal

import torch
from torch import Tensor

from agentsd import Recipe, apply_agentsd

from ..cost.macs import macs
from ..images.models import sampler
from ..images.sampling import Stopwatch
from .measurements import Measurements

Cost = Literal["macs", "seconds"]
Row = dict[str, Any]
"""What runs gain and lose, over prompts as geometric means.

That is `speedup`, the baseline's cost over theirs, `distance` to it, the latent relative RMSE, and where a
reference is run, `reference_distance`; `steps` has a letter for each step.
"""


@dataclass
class Runs:
    """Runs a pipeline on prompts; the i-th starts from the noise of `seed + i`.

    Attributes:
        pipe: the pipeline.
        prompts: one for each run.
        cost: what is counted.
        seed: of the first prompt.
        settings: of the pipeline's call.
        reference_steps: steps of the runs that `reference_distance` is to; None makes none.
        measurements: those that were made, by name.
        report: is called with the number of runs that are done.
    """

    pipe: Any
    prompts: Sequence[str]
    cost: Cost
    seed: int
    settings: dict[str, Any]
    reference_steps: int | None
    measurements: Measurements
    report: Callable[[int], Any]

    def run(self, number: int, **changes: Any) -> tuple[Tensor, float]:
        """(B, C, H, W) the final latents of a prompt's run, and what it cost."""
        made: list[Tensor] = []
        device, settings = self.pipe.unet.device, self.settings | changes

        def call() -> None:
            rng = torch.Generator("cpu").manual_seed(self.seed + number)
            made.append(self.pipe(self.prompts[number], generator=rng, output_type="latent", **settings)[0])

        if self.cost == "macs":
            spent: float = macs(call)
        else:
            with Stopwatch(device) as watch:
                call()
            spent = watch.seconds.charged(device)
        return made[0].cpu().double(), spent  # some devices have no float64

    def compare(
        self, recipe: Recipe | None, numbers: Sequence[int], scheduler: str | None = None, **changes: Any
    ) -> Row:
        """Of prompts' runs under a recipe, another sampler or settings."""
        name = repr((recipe and recipe.to_mapping(), scheduler, changes))
        measure = partial(self._measure, recipe, scheduler, changes)
        rows = [self.measurements.get(f"run {n} {name}", partial(measure, n)) for n in numbers]
        self.report(len(numbers))
        means = {key: _mean([row[key] for row in rows]) for key in rows[0] if key != "steps"}
        return means | {"steps": rows[-1]["steps"]}

    def _measure(
        self, recipe: Recipe | None, scheduler: str | None, changes: dict[str, Any], number: int
    ) -> Row:
        baseline, baseline_cost = self._plain(number, self.settings["num_inference_steps"])
        reference = self._plain(number, self.reference_steps)[0] if self.reference_steps else None
        with ExitStack() as stack:
            if scheduler is not None:
                stack.enter_context(sampler(self.pipe, scheduler))
            handle = recipe and stack.enter_context(apply_agentsd(self.pipe, recipe=recipe))
            latents, spent = self.run(number, **changes)
            steps = handle.summary().split()[0] if handle else ""
        found = {"speedup": baseline_cost / spent, "distance": relative_rmse(latents, baseline)}
        if reference is not None:
            found["reference_distance"] = relative_rmse(latents, reference)
        return found | {"steps": steps}

    def _plain(self, number: int, steps: int) -> tuple[Tensor, float]:
        """The latents and cost of a run of so many steps under the pipeline's own sampler."""

        def measure() -> list[Any]:
            latents, spent = self.run(number, num_inference_steps=steps)
            return [latents.tolist(), spent]

        latents, spent = self.measurements.get(f"plain {number}, {steps} steps", measure)
        return torch.tensor(latents, dtype=torch.float64, device="cpu"), spent


def relative_rmse(latents: Tensor, other: Tensor) -> float:
    """The root mean square of a change of latents, over theirs before it."""
    return float((latents - other).norm() / other.norm())


def _mean(values: Sequence[float]) -> float:
    """The geometric mean, as one run that goes another way would outweigh all others."""
    return geometric_mean(values) if all(values) else 0.0
