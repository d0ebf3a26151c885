"""The runs under way: where each is, which scheduler's it is, what it keeps, and what its calls were."""

from __future__ import annotations

import sys
import threading
import weakref
from collections import deque
from typing import Any

from torch import Tensor

from .by_distance import LatentDistance
from .cache.plan import StepKind, describe
from .context import CacheEntry
from .hosts.foreign import Changes
from .hosts.timesteps import RunReader, Step
from .sampler import ImpulseResponse, Sampler, holds
from .schedule import ByDistance, Phases

_MOST_CALLS = 4096
"""Of a run, whose kinds are kept: a loop by hand may repeat a timestep for ever."""
_MOST_RUNS = 8
"""That are kept at once, in all threads."""


class History:
    """What the calls of a run were.

    Attributes:
        kinds: of each call, the latest 4,096.
        corrected: how many cached steps were.
    """

    def __init__(self) -> None:
        self.kinds: deque[StepKind] = deque(maxlen=_MOST_CALLS)
        self.corrected = 0

    def describe(self) -> str:
        """A line of the calls."""
        letters = "".join(kind.letter for kind in self.kinds)
        return describe(letters, self.corrected, [kind.attention for kind in self.kinds])


class RunState:
    """The state of a run.

    Attributes:
        reader: places a call in the run by its timestep.
        scheduler: of the run, where it is known.
        sampler: what is known of that.
        is_open: the run's kinds of steps are planned.
        kinds: of its calls, by their place on the list of timesteps; empty where nothing is cached.
        changes: tells whether weights or scales change in it.
        response: of the sampler to each call's output, where cached steps are corrected.
        begin: the index of the first call that is planned.
        entries: the cache, by text and shape of latents.
        history: what its calls were.
        unmatched: how many calls in succession came on a text of their own.
    """

    def __init__(self, timing: Phases | ByDistance | None) -> None:
        self._timing = timing
        self.reader = RunReader(timing.early_frac if isinstance(timing, Phases) else 0.0)
        self._scheduler: Any = None
        self.sampler = Sampler(None, ())
        self.is_open = False
        self.kinds: dict[int, StepKind] = {}
        self.changes: Changes | None = None
        self.response: ImpulseResponse | None = None
        self.begin = 0
        self.entries: dict[Any, CacheEntry] = {}
        self.history = History()
        self.unmatched = 0
        self._distance = None
        if isinstance(timing, ByDistance):
            self._distance = LatentDistance(timing.thresholds)

    @property
    def scheduler(self) -> Any:
        """The run's scheduler, while it is in use elsewhere."""
        return None if self._scheduler is None else self._scheduler()

    @scheduler.setter
    def scheduler(self, found: Any) -> None:
        self._scheduler = None if found is None else weakref.ref(found)

    @property
    def is_over(self) -> bool:
        """Whether its scheduler is gone or has another list by now, so that no call of it will come."""
        return self._scheduler is not None and not holds(self.scheduler, self.reader.source)

    def stage(self, step: Step, latent: Tensor) -> int:
        """Which of the recipe's operators run in a call: 0 is the early one."""
        if self._distance is not None:
            return self._distance.read(latent, step.first_call, step.repeated_timestep)
        return 0 if step.early or self._timing is None else 1

    def forget(self) -> None:
        """Let go of all tensors that the run keeps; its next call opens it again."""
        self.entries.clear()
        self.is_open, self.changes = False, None


class Runs:
    """The runs under way on a U-Net. A run is a thread's on one list of timesteps.

    So pipelines that take turns, in threads of their own or in one (asyncio), each have their own.
    """

    def __init__(self, timing: Phases | ByDistance | None) -> None:
        self._timing = timing
        self._runs: dict[tuple[int, int], RunState] = {}  # the one that was called last comes last
        self._histories: dict[int, History] = {}  # the last of each thread
        self._latest = History()

    def __reduce__(self) -> tuple[Any, ...]:  # a copy begins anew
        return Runs, (self._timing,)

    def __iter__(self) -> Any:
        return iter(list(self._runs.values()))

    def of(self, source: Tensor | None) -> RunState:
        """The thread's run on a list of timesteps; on none, the one whose calls are placed by numbers."""
        key = threading.get_ident(), 0 if source is None else source.data_ptr()
        run = self._runs.pop(key, None)
        if run is None:
            self._drop()
            run = RunState(self._timing)
        self._runs[key] = run
        return run

    def _drop(self) -> None:
        """Let go of the runs that are over, before another begins."""
        alive = set(sys._current_frames())  # the ids of the threads that live
        self._histories = {thread: of for thread, of in self._histories.items() if thread in alive}
        live = {key: run for key, run in self._runs.items() if key[0] in alive and not run.is_over}
        self._runs = dict(list(live.items())[1 - _MOST_RUNS :])

    def note(self, run: RunState) -> None:
        """A call of a run has ended."""
        self._latest = self._histories[threading.get_ident()] = run.history

    @property
    def history(self) -> History:
        """Of the thread's last run; of the last run of any, where it had none."""
        return self._histories.get(threading.get_ident(), self._latest)

    def end(self) -> None:
        """Let go of the thread's run that was called last."""
        mine = [key for key in self._runs if key[0] == threading.get_ident()]
        if mine:
            del self._runs[mine[-1]]

    def clear(self) -> None:
        """Let go of all runs, of all threads."""
        self._runs.clear()
