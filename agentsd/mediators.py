"""How many agents a step gets by how far the latent moves ("Efficient Diffusion Transformer with Step-wise
Dynamic Attention Mediators", ECCV 2024, Eq. 10 and 11)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


class LatentDistance:
    """Follows a run's latents and says, for each, the number of agents of the stage it is in.

    The distance is L1, which the paper found the better one. A run's first call has none and is in the
    first stage; the second call's is the one that the others are compared with. A call that repeats a
    timestep stays in its stage.

    Where a sampler adds noise in every step, as the paper's do, the distance falls from step to step; under a
    deterministic one (DDIM, PLMS, DPM++) it tends to grow, and a run stays in its first stage.

    Args:
        counts: agents in each stage.
        thresholds: shares of the first distance, falling; stage i + 1 begins at the i-th.
        per_sample: each image of a batch is in a stage of its own; else the batch's mean distance counts.
    """

    def __init__(self, counts: Sequence[int], thresholds: Sequence[float], per_sample: bool) -> None:
        self.counts = tuple(counts)
        self.thresholds = tuple(thresholds)
        self.per_sample = per_sample
        self._previous: Tensor | None = None
        self._first: list[float] | None = None
        self._agents: tuple[int, ...] = ()

    def read(self, latent: Tensor, opens: bool, repeats: bool = False) -> tuple[int, ...]:
        """The number of agents for each image of a call on `latent` (B, ..., H, W).

        Args:
            latent: what the denoiser is called on.
            opens: the call is a run's first.
            repeats: it has the timestep of the call before.
        """
        before, self._previous = self._previous, latent.detach().clone()
        batch = latent.shape[0]
        if opens or before is None or before.shape != latent.shape:
            self._first = None
            self._agents = self.counts[:1] * batch
            return self._agents
        if repeats:
            return self._agents
        moved = (self._previous - before).float().abs().flatten(1).mean(1)
        distances = (moved if self.per_sample else moved.mean().expand(batch)).tolist()
        self._first = self._first or distances
        self._agents = tuple(self._count(d, d0) for d, d0 in zip(distances, self._first, strict=True))
        return self._agents

    def _count(self, distance: float, first: float) -> int:
        passed = [i + 1 for i, share in enumerate(self.thresholds) if distance <= share * first]
        return self.counts[max(passed, default=0)]
