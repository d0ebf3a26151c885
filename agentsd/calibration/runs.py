"""Whole runs of a pipeline beside the baseline's: what they cost, and how far their latents end from the
baseline's."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from hashlib import sha256
from statistics import geometric_mean, median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..cache.conditional import with_sample
from ..patch import apply_agentsd
from ..recipe import Recipe
from .cost import Cost, cost_of
from .journal import Journal
from .losses import mean_square
from .recording import Call, standing_in


class Figures(NamedTuple):
    """What runs under a recipe, or of fewer steps, gain and lose.

    Attributes:
        speedup: cost of the baseline's U-Net calls over theirs.
        distance: root mean square of the change of the final latents, over that of the baseline's latents; a
            geometric mean over the runs, as one that goes another way would outweigh all others.
        reference: the same to the latents of many more steps, where those were run.
        calls: what the U-Net's calls of the last run were, a symbol each; empty without a recipe.
        levels: the run's noise levels, in training timesteps.
    """

    speedup: float
    distance: float
    reference: float | None
    calls: str
    levels: list[float]


class Runs:
    """Runs a pipeline on prompts; the i-th starts from the noise of `seed + i`.

    Args:
        pipe: the pipeline.
        unet: its U-Net.
        cost: what is counted.
        prompts: one for each run.
        counted: runs whose MACs are counted; time is taken of all.
        seed: of the first run.
        settings: of the pipeline's call.
        journal: of what was measured.
        judged: runs that are compared with reference ones too.
        reference_steps: steps of those; None makes none.
    """

    def __init__(
        self,
        pipe: Any,
        unet: Any,
        cost: Cost,
        prompts: Sequence[str],
        counted: Sequence[int],
        seed: int,
        settings: dict[str, Any],
        journal: Journal,
        judged: Sequence[int],
        reference_steps: int | None,
    ) -> None:
        self._pipe, self._unet, self._cost = pipe, unet, cost
        self._prompts, self._counted, self._seed = prompts, counted, seed
        self._settings, self._journal = settings, journal
        self._judged, self._reference_steps = judged, reference_steps

    def run(self, number: int, **changes: Any) -> Tensor:
        """(B, C, H, W) the final latents of a prompt's run."""
        rng = torch.Generator().manual_seed(self._seed + number)
        settings = self._settings | changes
        latents: Tensor = self._pipe(self._prompts[number], generator=rng, output_type="latent", **settings)[
            0
        ]
        return latents

    def baseline(self, number: int, run: Callable[[], Tensor] | None = None) -> tuple[Tensor, float | None]:
        """A baseline run's latents (B, C, H, W) and the cost of its calls, where that is counted.

        Args:
            number: the prompt's.
            run: makes it, where more is wanted of it.
        """

        def measure() -> dict[str, Any]:
            latents, costs = self._metered(number, run or (lambda: self.run(number)))
            # All are alike; a first one, which is slower as caches are cold, would flatter what comes after.
            spent = median(costs) * len(costs) if costs else None
            return {"latents": latents.float().tolist(), "spent": spent}

        found = self._journal.get(f"baseline {number}", measure)
        return torch.tensor(found["latents"]), found["spent"]

    def power(self, numbers: Sequence[int]) -> float:
        """Sum of the mean squares of the baseline's final latents."""
        return sum(mean_square(self.baseline(number)[0]) for number in numbers)

    def baseline_reference(self) -> float | None:
        """The distance of the judged baseline runs to reference ones."""
        return _mean([self._to_reference(n, self.baseline(n)[0]) for n in self._judged])

    def _to_reference(self, number: int, latents: Tensor) -> tuple[float, float] | None:
        """Mean squares of the change to a reference run's latents, and of those."""
        if self._reference_steps is None or number not in self._judged:
            return None

        def measure() -> Any:
            return self.run(number, num_inference_steps=self._reference_steps).float().tolist()

        reference = torch.tensor(self._journal.get(f"reference {number}", measure))
        return mean_square(latents - reference), mean_square(reference)

    def compare(self, recipe: Recipe | None, numbers: Sequence[int], **changes: Any) -> Figures:
        """Run prompts under a recipe, or with changed settings, and compare them with the baseline's runs."""
        of = repr((None if recipe is None else recipe.to_mapping(), changes))
        key = sha256(of.encode()).hexdigest()[:16]
        rows = [
            self._journal.get(f"run {number} {key}", partial(self._beside_baseline, number, recipe, changes))
            for number in numbers
        ]
        counted = [i for i, row in enumerate(rows) if row["spent"] is not None]
        baseline = sum(self.baseline(numbers[i])[1] or 0.0 for i in counted)
        return Figures(
            baseline / sum(rows[i]["spent"] for i in counted),
            _mean([(row["moved"], self.power([n])) for row, n in zip(rows, numbers, strict=True)]) or 0.0,
            _mean([row["to_reference"] for row in rows]),
            rows[-1]["calls"],
            rows[-1]["levels"],
        )

    def _beside_baseline(self, number: int, recipe: Recipe | None, changes: dict[str, Any]) -> dict[str, Any]:
        with nullcontext() if recipe is None else apply_agentsd(self._pipe, recipe=recipe) as handle:
            latents, costs = self._metered(number, lambda: self.run(number, **changes))
            calls = "" if handle is None else handle.summary().split()[0]
        levels = list(dict.fromkeys(self._pipe.scheduler.timesteps.tolist()))
        latents = latents.float().cpu()
        return {
            "spent": sum(costs) if costs else None,
            "moved": mean_square(latents - self.baseline(number)[0]),
            "to_reference": self._to_reference(number, latents),
            "calls": calls,
            "levels": levels,
        }

    def _metered(self, number: int, run: Callable[[], Tensor]) -> tuple[Tensor, list[float]]:
        """What `run` returns, and what each U-Net call cost, where that is counted."""
        spent: list[float] = []
        if self._cost == "macs" and number not in self._counted:
            return run(), []

        def forward(host: Any, *args: Any, **kwargs: Any) -> Any:
            outputs: list[Any] = []
            device = self._unet.device
            spent.append(cost_of(self._cost, device, lambda: outputs.append(host(*args, **kwargs))))
            return outputs[0]

        with standing_in(self._unet, forward):
            return run(), spent

    def moved_by(self, calls: list[Call], place: int, change: Tensor) -> float:
        """Mean square that the first run's latents move by where one call gives something else.

        Calls up to that place are not computed again.

        Args:
            calls: the first run's.
            place: which of them.
            change: (B, C, H, W) of its prediction.
        """
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
            latents = self.run(0)
        return mean_square(latents.float().cpu() - self.baseline(0)[0])


def _mean(pairs: Sequence[Sequence[float] | None]) -> float | None:
    """The geometric mean of the roots of first numbers over second ones; None where some are not known."""
    known = [math.sqrt(pair[0] / pair[1]) for pair in pairs if pair is not None]
    if len(known) < len(pairs):
        return None
    return geometric_mean(known) if all(known) else 0.0
