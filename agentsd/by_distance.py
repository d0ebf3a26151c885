"""What attention runs by how far the latent moves in a step.

From "Efficient Diffusion Transformer with Step-wise Dynamic Attention Mediators" (ECCV 2024), Eq. 10 and 11.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from .attention import Operator, PooledAgents
from .attention.operator import check_operator
from .checks import check


@dataclass(frozen=True)
class ByDistance:
    """What runs by how far the latent moves in a step, for samplers that add noise, such as DDPM.

    Attributes:
        stages: what runs in each stage; None is full attention.
        thresholds: shares of the first distance at which the next stage begins, falling.
        per: one stage for the whole "batch", or for each "sample" (needs `PooledAgents` in each stage, which
            differ in their count alone).
    """

    stages: tuple[Operator | None, ...]
    thresholds: tuple[float, ...]
    per: str = "batch"

    def __post_init__(self) -> None:
        for name in ("stages", "thresholds"):
            value = getattr(self, name)
            check(name, value, isinstance(value, list | tuple), "pass a list or a tuple")
            object.__setattr__(self, name, tuple(value))
        for stage in self.stages:
            check_operator("stages", stage)
        falls = list(self.thresholds) == sorted(self.thresholds, reverse=True)
        ok = falls and all(isinstance(x, float | int) and x >= 0 for x in self.thresholds)
        check("thresholds", self.thresholds, ok, "pass falling shares of the first distance, as (0.6, 0.3)")
        count = len(self.thresholds) + 1
        check("stages", self.stages, len(self.stages) == count, f"thresholds make {count}: name so many")
        check("stages", self.stages, len(set(self.stages)) > 1, "they are all the same: pass that alone")
        check("per", self.per, self.per in ("batch", "sample"), "choose 'batch' or 'sample'")
        if self.per == "sample":
            alike = {replace(s, count=None) if isinstance(s, PooledAgents) else s for s in self.stages}
            ok = len(alike) == 1 and isinstance(next(iter(alike)), PooledAgents)
            check(
                "stages", self.stages, ok, "per='sample' needs PooledAgents that differ in their count alone"
            )


class LatentDistance:
    """Follows a run's latents and says, for each, the stage it is in.

    The distance is L1, which the paper found the better one. A run's first call has none and is in the
    first stage; the second call's is the one that the others are compared with. A call that repeats a
    timestep stays in its stage. Where guidance is cut off in the middle of a run, the images that are left
    go on as they were.

    Where a sampler adds noise in every step, as the paper's do, the distance falls from step to step; under a
    deterministic one (DDIM, PLMS, DPM++) it tends to grow, and a run stays in its first stage.

    Args:
        thresholds: shares of the first distance, falling; stage i + 1 begins at the i-th.
        per_sample: each image of a batch is in a stage of its own; else the batch's mean distance counts.
    """

    def __init__(self, thresholds: Sequence[float], per_sample: bool) -> None:
        self.thresholds = tuple(thresholds)
        self.per_sample = per_sample
        self._previous: Tensor | None = None
        self._first: list[float] | None = None
        self._stages: tuple[int, ...] = ()

    def read(self, latent: Tensor, first_call: bool, repeated_timestep: bool = False) -> tuple[int, ...]:
        """The stage of each image of a call on `latent` (B, ..., H, W).

        Args:
            latent: what the denoiser is called on.
            first_call: the call is a run's first.
            repeated_timestep: it has the timestep of the call before.
        """
        before, self._previous = self._previous, latent.detach().clone()
        batch = latent.shape[0]
        if first_call or before is None or before.shape[1:] != latent.shape[1:] or before.shape[0] < batch:
            self._first = None
            self._stages = (0,) * batch
            return self._stages
        if before.shape[0] > batch:  # the prompt's half comes last
            before = before[-batch:]
            self._first = self._first and self._first[-batch:]
            self._stages = self._stages[-batch:]
        if repeated_timestep:
            return self._stages
        moved = (self._previous - before).float().abs().flatten(1).mean(1)
        distances = (moved if self.per_sample else moved.mean().expand(batch)).tolist()
        self._first = self._first or distances
        self._stages = tuple(self._stage(d, d0) for d, d0 in zip(distances, self._first, strict=True))
        return self._stages

    def _stage(self, distance: float, first: float) -> int:
        passed = [i + 1 for i, share in enumerate(self.thresholds) if distance <= share * first]
        return max(passed, default=0)
