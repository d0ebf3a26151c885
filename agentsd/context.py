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
        place: in the scheduler's list, of its last call.
        halved: a conditional-only step was made.
    """

    text: Any
    guided: bool
    features: list[CachedFeatures]
    residuals: Residuals | None = None
    difference: Tensor | None = None
    cached: list[StepContext] = field(default_factory=list)
    place: int = -1
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
    inputs: dict[str, Any] | None = None
    kind: StepKind = COMPUTED
    sigma: float | None = None
    sampler_step: SigmaStep | None = None
    entry: CacheEntry | None = None
    is_last: bool = False
    prediction: Tensor | None = None

    def conditional(self) -> StepContext:
        """The conditional-only step in a guided one whose prediction is known."""
        assert self.inputs is not None
        batch = self.inputs["sample"].shape[0]
        inputs = conditional_arguments(self.inputs)
        inputs["sample"] = inputs["sample"].clone()  # a view would be another graph under torch.compile
        return replace(
            self,
            stages=self.stages[len(self.stages) // 2 :],
            inputs=inputs,
            kind=replace(self.kind, guided=False),
            prediction=conditional_half(self.prediction, batch),
        )
