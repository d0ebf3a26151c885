"""What attention runs by how far the latent moves in a step.

From "Efficient Diffusion Transformer with Step-wise Dynamic Attention Mediators" (ECCV 2024), Eq. 10 and 11.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ..attention import Operator
from ..checks import check
from .operator import check_operator


@dataclass(frozen=True)
class ByDistance:
    """What runs by how far the latent moves in a step, for samplers that add noise, such as DDPM.

    Attributes:
        stages: what runs in each stage; None is full attention.
        thresholds: shares of the first distance at which the next stage begins, falling.
    """

    stages: tuple[Operator | None, ...]
    thresholds: tuple[float, ...]

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


class LatentDistance:
    """Follows a run's latents and says which stage it is in.

    The distance is L1, which the paper found the better one, averaged over the batch: the paper's stage of
    each image's own is that of a batch of one. A run's first call has none and is in the first stage; the
    second call's is the one that the others are compared with. A call that repeats a timestep stays in its
    stage. Where guidance is cut off in the middle of a run, the images that are left go on as they were.

    Where a sampler adds noise in every step, as the paper's do, the distance falls from step to step; under a
    deterministic one (DDIM, PLMS, DPM++) it tends to grow, and a run stays in its first stage.

    Args:
        thresholds: shares of the first distance, falling; stage i + 1 begins at the i-th.
    """

    def __init__(self, thresholds: Sequence[float]) -> None:
        self.thresholds = tuple(thresholds)
        self._previous: Tensor | None = None
        self._first: float | None = None
        self._stage = 0

    def read(self, latent: Tensor, begins: bool, repeats: bool = False) -> int:
        """The stage of a call on `latent` (B, ..., H, W).

        Args:
            latent: what the denoiser is called on.
            begins: the call is a run's first.
            repeats: it has the timestep of the call before.
        """
        before, self._previous = self._previous, latent.detach().clone()
        batch = latent.shape[0]
        if begins or before is None or before.shape[1:] != latent.shape[1:] or before.shape[0] < batch:
            self._first, self._stage = None, 0
        elif not repeats:
            same = before[-batch:]  # where guidance is cut off: the prompt's come last
            distance = float((self._previous - same).float().abs().mean())
            self._first = self._first or distance
            passed = [i + 1 for i, share in enumerate(self.thresholds) if distance <= share * self._first]
            self._stage = max(passed, default=0)
        return self._stage
