"""A thread's run: where it is, which scheduler's it is, what it keeps, and what its steps were."""

from __future__ import annotations

import threading
from typing import Any

from torch import Tensor

from .by_distance import LatentDistance
from .cache.plan import StepKind, describe
from .context import CacheEntry
from .hosts.schedulers import Sampler, SigmaStep
from .hosts.timesteps import RunReader, Step
from .schedule import ByDistance, Phases


class RunState(threading.local):
    """The state of a thread's run.

    Attributes:
        reader: places a call in the run by its timestep.
        scheduler: of the run, where it is known.
        sampler: what that can do.
        is_open: the run's kinds of steps are planned.
        kinds: of its steps by their noise level; empty where nothing is cached.
        sampler_steps: what each step of the sampler makes of a prediction, where cached steps are corrected.
        entries: the cache, by text and shape of latents.
        history: the kind of each call so far.
        corrected: how many cached steps were.
        unmatched: how many calls in succession came on a text of their own.
    """

    def __init__(self, timing: Phases | ByDistance | None) -> None:
        self._timing = timing
        self.reader = RunReader(timing.early_frac if isinstance(timing, Phases) else 0.0)
        self.scheduler: Any = None
        self.sampler = Sampler(None, ())
        self.is_open = False
        self.kinds: dict[float, StepKind] = {}
        self.sampler_steps: list[SigmaStep | None] = []
        self.entries: dict[Any, CacheEntry] = {}
        self.history: list[StepKind] = []
        self.corrected = 0
        self.unmatched = 0
        self._distance = None
        if isinstance(timing, ByDistance):
            self._distance = LatentDistance(timing.thresholds, timing.per == "sample")

    def __reduce__(self) -> tuple[Any, ...]:  # a copy begins anew
        return RunState, (self._timing,)

    def stages(self, step: Step, latent: Tensor) -> tuple[int, ...]:
        """The stage of each image."""
        if self._distance is not None:
            return self._distance.read(latent, step.first_call, step.repeated_timestep)
        return (0 if step.early or self._timing is None else 1,) * latent.shape[0]

    def describe(self) -> str:
        """A line of what its steps were; empty before the first."""
        if not self.history:
            return ""
        letters = "".join(kind.letter for kind in self.history)
        return describe(letters, self.corrected, [kind.attention for kind in self.history])

    def reset(self) -> None:
        """Let go of all that the run keeps."""
        self.entries.clear()
        self.is_open = False
        self.sampler = Sampler(None, ())
