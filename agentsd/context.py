"""What a call of the denoiser is, and what the calls on one text leave for those after them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from .cache.correction import Corrections
from .cache.features import CachedFeatures
from .cache.plan import COMPUTED, StepKind
from .cache.residuals import Residuals


@dataclass
class CacheEntry:
    """What the calls of a run on one text and one shape of latents keep.

    Attributes:
        text: held, so that no other tensor gets its address.
        features: where the last layers begin.
        residuals: of attention, where they are shared.
        corrections: of what cached calls got wrong, where the sampler's response is known.
        cached: the cached calls since the last computed one that are to be corrected.
        step_index: in the scheduler's list, of its last call.
    """

    text: Any
    features: CachedFeatures
    residuals: Residuals | None = None
    corrections: Corrections | None = None
    cached: list[StepContext] = field(default_factory=list)
    step_index: int = -1


@dataclass
class StepContext:
    """A call of the denoiser.

    Attributes:
        latent: (B, ..., H, W) what it is called on.
        timestep: its noise level, in training timesteps.
        index: its place on the run's list of timesteps.
        stage: which of the recipe's operators run in it.
        inputs: its arguments by name, where something is cached.
        kind: what it computes.
        sigma: its noise level, as features are kept by.
        entry: where its features are kept; None if they are not.
        is_last: it is in the last step of its run.
        given: (B, ...) what a cached call gave, until it is corrected.
    """

    latent: Tensor
    timestep: float
    index: int
    stage: int
    inputs: dict[str, Any] = field(default_factory=dict)
    kind: StepKind = COMPUTED
    sigma: float | None = None
    entry: CacheEntry | None = None
    is_last: bool = False
    given: Tensor | None = None

    @property
    def residuals(self) -> Residuals | None:
        """Attention's, where they are shared."""
        return None if self.entry is None else self.entry.residuals
