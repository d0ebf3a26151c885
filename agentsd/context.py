"""What a call of the denoiser is, and what the calls on one text leave for those after them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from .cache.conditional import conditional_arguments, conditional_half
from .cache.features import CachedFeatures
from .cache.plan import COMPUTED, StepKind
from .cache.residuals import Residuals
from .hosts.schedulers import SigmaStep


@dataclass
class CacheEntry:
    """What the calls of a run on one text and one shape of latents keep.

    Attributes:
        text: held, so that no other tensor gets its address.
        guided: both passes of guidance are in the batch.
        features: of the unconditional and the conditional pass, or of all images.
        residuals: of attention, where they are shared.
        difference: conditional minus unconditional prediction of the last guided step.
        cached: the cached steps since the last computed one that are to be corrected.
        step_index: in the scheduler's list, of its last call.
        halved: a conditional-only step was made.
    """

    text: Any
    guided: bool
    features: list[CachedFeatures]
    residuals: Residuals | None = None
    difference: Tensor | None = None
    cached: list[StepContext] = field(default_factory=list)
    step_index: int = -1
    halved: bool = False


@dataclass
class StepContext:
    """A call of the denoiser.

    Attributes:
        latent: (B, ..., H, W) what it is called on.
        timestep: its noise level, in training timesteps.
        stages: of its images; of the conditional half of them in a conditional-only step.
        inputs: its arguments by name, where something is cached.
        kind: what it computes.
        sigma: its noise level, as features are kept by.
        sampler_step: what its sampler's step makes of it, where cached steps are corrected.
        entry: where its features are kept; None if they are not.
        is_last: it is in the last step of its run.
        prediction: (B, ...) what a cached step gave, until it is corrected.
    """

    latent: Tensor
    timestep: float
    stages: tuple[int, ...]
    inputs: dict[str, Any] = field(default_factory=dict)
    kind: StepKind = COMPUTED
    sigma: float | None = None
    sampler_step: SigmaStep | None = None
    entry: CacheEntry | None = None
    is_last: bool = False
    prediction: Tensor | None = None

    @property
    def features(self) -> list[CachedFeatures]:
        """Those of the passes that it computes."""
        assert self.entry is not None
        return self.entry.features if self.kind.guided else self.entry.features[-1:]

    @property
    def residuals(self) -> Residuals | None:
        """Attention's, where they are shared."""
        return None if self.entry is None else self.entry.residuals

    def halve(self) -> None:
        """Make it conditional-only: its inputs and stages are those of the conditional pass."""
        self.inputs = conditional_arguments(self.inputs)
        self.stages = self.stages[len(self.stages) // 2 :]

    def conditional(self) -> StepContext:
        """The conditional-only step in a guided one whose prediction is known."""
        batch = self.inputs["sample"].shape[0]
        prediction = conditional_half(self.prediction, batch)
        half = replace(self, kind=replace(self.kind, guided=False), prediction=prediction)
        half.halve()
        half.inputs["sample"] = half.inputs["sample"].clone()  # a view would be another compiled graph
        return half
