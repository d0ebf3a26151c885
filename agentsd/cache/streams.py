"""What a run keeps from call to call: for each text and shape of latents, and for each thread."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ..hosts.schedulers import Sampler, SigmaStep
from .correction import CachedStep
from .plan import Kind
from .residuals import Residuals
from .states import States


@dataclass
class Stream:
    """The calls of a run on one text and one shape of latents.

    Attributes:
        text: held, so that no other tensor gets its address.
        guided: both passes of guidance are in its batch.
        states: of the unconditional and the conditional pass, or of all pictures.
        residuals: of attention, where they are shared.
        difference: conditional minus unconditional prediction of the last guided step.
        cached: the calls since the last computed one that are to be corrected.
        place: in the scheduler's list, of its last call.
        halved: a conditional-only step was made.
    """

    text: Any
    guided: bool
    states: list[States]
    difference: Tensor | None = None
    residuals: Residuals | None = None
    cached: list[CachedStep] = field(default_factory=list)
    place: int = -1
    halved: bool = False


class Kept(threading.local):
    """What a thread's run keeps."""

    def __init__(self) -> None:
        self.open = False
        self.plan: dict[float, Kind] = {}
        self.streams: dict[Any, Stream] = {}
        self.sampler = Sampler(None, ())
        self.steps: list[SigmaStep | None] = []  # where cached steps are corrected
        self.corrected = 0  # cached steps of the run
        self.unmatched = 0  # calls in succession that came on a text of their own

    def __reduce__(self) -> tuple[Any, ...]:  # a copy begins anew
        return Kept, ()


def identity(text: Any) -> Any:
    """What says that a tensor is the same one, unchanged, without a look at its numbers."""
    if not isinstance(text, Tensor):
        return id(text)
    version = 0 if text.is_inference() else text._version
    return text.data_ptr(), text.shape, text.stride(), version
