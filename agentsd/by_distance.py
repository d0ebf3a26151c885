"""Which stage a step is in by how far the latent moves.

From "Efficient Diffusion Transformer with Step-wise Dynamic Attention Mediators" (ECCV 2024), Eq. 10 and 11.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


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
