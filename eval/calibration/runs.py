"""Whole runs of a pipeline, beside the baseline's: their cost, and how far from it their latents end."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from statistics import geometric_mean
from typing import Any

import torch
from torch import Tensor

from agentsd import Recipe, apply_agentsd

from ..cost.macs import Cost, cost_of
from ..images.models import sampler
from .measurements import Measurements


@dataclass(frozen=True)
class Metrics:
    """What runs under a recipe, or of fewer steps, gain and lose.

    Attributes:
        speedup: cost of the baseline's U-Net calls over theirs.
        distance: latent relative RMSE to the baseline: the root mean square of the change of the final
            latents over that of the baseline's; a geometric mean over the prompts.
        reference_distance: the same to the latents of `reference_steps`, where those are run.
        steps: what each step of the last prompt's run was, a letter a call; empty without a recipe.
    """

    speedup: float
    distance: float
    reference_distance: float | None
    steps: str


@dataclass
class Runs:
    """Runs a pipeline on prompts; the i-th starts from the noise of `seed + i`.

    Attributes:
        pipe: the pipeline.
        prompts: one for each run.
        cost: what is counted, in each run of the first prompt.
        seed: of the first prompt.
        settings: of the pipeline's call.
        reference_steps: steps of the runs that `reference_distance` is to; None makes none.
        measurements: those that were made, by name.
    """

    pipe: Any
    prompts: Sequence[str]
    cost: Cost
    seed: int
    settings: dict[str, Any]
    reference_steps: int | None
    measurements: Measurements

    def latents(self, number: int, **changes: Any) -> Tensor:
        """(B, C, H, W) the final latents of a prompt's run."""
        rng = torch.Generator("cpu").manual_seed(self.seed + number)
        settings = self.settings | changes
        found: Tensor = self.pipe(self.prompts[number], generator=rng, output_type="latent", **settings)[0]
        return found.float().cpu()

    def compare(
        self, recipe: Recipe | None, numbers: Sequence[int], scheduler: str | None = None, **changes: Any
    ) -> Metrics:
        """Run prompts under a recipe, another sampler or settings; compare with the baseline's runs."""
        of = repr((None if recipe is None else recipe.to_mapping(), scheduler, changes))
        key = sha256(of.encode()).hexdigest()[:16]

        def measured(number: int) -> dict[str, Any]:
            measure = partial(self._measure, number, recipe, scheduler, changes)
            found: dict[str, Any] = self.measurements.get(f"run {number} {key}", measure)
            return found

        rows, first = [measured(number) for number in numbers], measured(0)
        return Metrics(
            self._baseline(0)["cost"] / first["cost"],
            _mean([row["distance"] for row in rows]) or 0.0,
            _mean([row["reference_distance"] for row in rows]),
            rows[-1]["steps"],
        )

    def baseline_reference_distance(self, numbers: Sequence[int]) -> float | None:
        """The baseline's own distance to the reference."""
        pairs = [(self._baseline_latents(n), self._reference_latents(n)) for n in numbers]
        return _mean([None if right is None else relative_rmse(latents, right) for latents, right in pairs])

    def _baseline_latents(self, number: int) -> Tensor:
        return torch.tensor(self._baseline(number)["latents"], device="cpu")

    def _baseline(self, number: int) -> dict[str, Any]:
        def measure() -> dict[str, Any]:
            if number == 0:  # a first run is slower, as caches are cold, and would flatter what comes after
                self.latents(0, num_inference_steps=2) if self.cost == "seconds" else None
            latents, cost = self._metered(number)
            return {"latents": latents.tolist(), "cost": cost}

        found: dict[str, Any] = self.measurements.get(f"baseline {number}", measure)
        return found

    def _measure(
        self, number: int, recipe: Recipe | None, scheduler: str | None, changes: dict[str, Any]
    ) -> dict[str, Any]:
        baseline, reference = self._baseline_latents(number), self._reference_latents(number)
        with ExitStack() as stack:
            if scheduler is not None:
                stack.enter_context(sampler(self.pipe, scheduler))
            handle = None
            if recipe is not None:
                handle = stack.enter_context(apply_agentsd(self.pipe, recipe=recipe))
            latents, cost = self._metered(number, **changes)
            steps = "" if handle is None else handle.summary().split()[0]
        return {
            "cost": cost,
            "distance": relative_rmse(latents, baseline),
            "reference_distance": None if reference is None else relative_rmse(latents, reference),
            "steps": steps,
        }

    def _reference_latents(self, number: int) -> Tensor | None:
        if self.reference_steps is None:
            return None
        run = partial(self.latents, number, num_inference_steps=self.reference_steps)
        reference = self.measurements.get(f"reference {number}", lambda: run().tolist())
        return torch.tensor(reference, device="cpu")

    def _metered(self, number: int, **changes: Any) -> tuple[Tensor, float | None]:
        """A run's latents, and the cost of its U-Net calls, which of MACs is counted for the first prompt."""
        if number and self.cost == "macs":
            return self.latents(number, **changes), None
        spent: list[float] = []
        host = self.pipe.unet.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            outputs: list[Any] = []
            spent.append(
                cost_of(self.cost, self.pipe.unet.device, lambda: outputs.append(host(*args, **kwargs)))
            )
            return outputs[0]

        forward.agentsd_may_skip = True  # type: ignore[attr-defined]
        before = vars(self.pipe.unet).get("forward")
        self.pipe.unet.forward = forward
        try:
            latents = self.latents(number, **changes)
        finally:
            del self.pipe.unet.forward
            if before is not None:
                self.pipe.unet.forward = before
        return latents, sum(spent)


def relative_rmse(latents: Tensor, other: Tensor) -> float:
    """The root mean square of a change of latents, over theirs before it."""
    latents, other = latents.cpu().double(), other.cpu().double()  # some devices have no float64
    return float((latents - other).norm() / other.norm())


def _mean(distances: Sequence[float | None]) -> float | None:
    """The geometric mean, as one run that goes another way would outweigh all others."""
    known = [distance for distance in distances if distance is not None]
    if len(known) < len(distances):
        return None
    return geometric_mean(known) if all(known) else 0.0
