"""The runs under way: where in its list of timesteps each is, and what its calls were."""

from __future__ import annotations

import math
import sys
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .attention.by_distance import LatentDistance
from .foreign import Changes
from .memory import CacheEntry
from .plan import StepKind, describe
from .recipe import ByDistance, Phases
from .sampler import ImpulseResponse, Sampler, holds

TRAINING_TIMESTEPS = tuple(float(t) for t in range(999, -1, -1))
"""What a call is placed by that no scheduler's list is known of, noisiest first."""
_NEAR = 1e-3  # float32 schedules miss their own values by less


def early_threshold(timesteps: Sequence[float], early_frac: float) -> float:
    """The timestep that every early one is greater than.

    Args:
        timesteps: the scheduler's whole list; repeats (PLMS, Heun) count once.
        early_frac: share of the steps that are early.
    """
    unique = sorted(set(timesteps), reverse=True)
    last = round(early_frac * len(unique))
    if last == 0:
        return math.inf
    return unique[last] if last < len(unique) else -math.inf


@dataclass(frozen=True)
class Step:
    """One U-Net call's place in a run.

    Attributes:
        timestep: the noise level, in training timesteps.
        early: whether the step is one of the first `early_frac`.
        first_call: the call is a run's first.
        repeated_timestep: it has the timestep of the call before, in the same run (PLMS, Heun).
        skips_timesteps: it skips timesteps of the list, otherwise than the call before.
        has_no_early_step: and the run has no early step.
        off_list: its timestep is not on the list that it was placed by.
    """

    timestep: float
    early: bool
    first_call: bool
    repeated_timestep: bool
    has_no_early_step: bool
    off_list: bool = False
    skips_timesteps: bool = False


class RunReader:
    """Turns the timestep of a U-Net call into a `Step`.

    Pipelines pass an element of their scheduler's list, and the element's storage is that list: so the run
    that calls is followed, whichever pipeline it is of. Else the list is that of the scheduler it is given,
    and else the training timesteps.

    Args:
        early_frac: share of the steps that are early.

    Attributes:
        timesteps: the list that the last call was placed by.
        step_index: the last call's index in it.
        stride: indices from one call to the next: 1, or more where a caller skips timesteps.
        source: the tensor that the list was read from; held, so that no other list gets its address.
        guesses: no scheduler's list was known of the last call.
    """

    def __init__(self, early_frac: float) -> None:
        self.early_frac = early_frac
        self.timesteps: list[float] = []
        self.step_index = -1
        self.stride = 1
        self.source: Tensor | None = None
        self.guesses = False
        self._version = -1
        self._threshold = math.inf
        self._previous = math.nan

    def read(self, timestep: Any, known: Any = None) -> Step:
        """Read one call.

        Args:
            timestep: the U-Net's second argument: a number or a tensor; of a batch of different timesteps
                the largest one counts.
            known: the list that a timestep is placed by which is an element of none.
        """
        own = own_list(timestep)
        known = own if own is not None else known
        renewed = self._look_up(known, is_own=own is not None)
        before = self.step_index
        if own is not None:
            self.step_index = timestep.storage_offset()
            t = self.timesteps[self.step_index]
        else:
            t = float(timestep.max() if isinstance(timestep, Tensor) else timestep)
            self.step_index = self._nearest(t, before if not renewed else -1)
        off_list = not _near(self.timesteps[self.step_index], t)
        first_call = renewed or self.step_index < before
        repeated_timestep = not first_call and t == self._previous
        moved = self.step_index - before
        skips_timesteps = not first_call and moved not in (0, self.stride)
        if first_call or skips_timesteps:
            self.stride = moved if skips_timesteps else 1
        self._previous = t
        self.guesses = known is None
        ahead = map(self._is_early, self.timesteps[self.step_index :])
        no_early = first_call and self.early_frac > 0 and not self.guesses and not any(ahead)
        return Step(t, self._is_early(t), first_call, repeated_timestep, no_early, off_list, skips_timesteps)

    def _is_early(self, timestep: float) -> bool:
        return timestep > self._threshold + _NEAR

    def _look_up(self, known: Any, is_own: bool) -> bool:
        """Read a list again if it may have changed; returns whether another run has begun by that."""
        if isinstance(known, Tensor):
            version = 0 if known.is_inference() else known._version
            if _same(known, self.source) and version == self._version:
                return False
            self.source, self._version = known, version
            values = list(map(float, known.flatten().tolist()))  # some devices have no float64
        else:
            self.source = None
            values = list(TRAINING_TIMESTEPS if known is None else map(float, known))
        if values == self.timesteps and not is_own:  # a scheduler may make its list anew at each look
            return False
        self.timesteps = values
        self._threshold = early_threshold(values, self.early_frac)
        return True

    def _nearest(self, t: float, start: int) -> int:
        """The index of a timestep: the next one after `start`, or that one again, or else the first."""
        near = [i for i, x in enumerate(self.timesteps) if _near(x, t)]
        for index in (start + 1, start, *(i for i in near if i > start), *near):
            if index in near:
                return index
        return min(range(len(self.timesteps)), key=lambda i: abs(self.timesteps[i] - t))


def _near(listed: float, timestep: float) -> bool:
    return abs(listed - timestep) <= _NEAR * max(1.0, abs(timestep))


def _same(one: Tensor, other: Tensor | None) -> bool:
    if other is None:
        return False
    return one.data_ptr() == other.data_ptr() and one.shape == other.shape and one.dtype == other.dtype


def list_of(scheduler: Any) -> Any:
    """A scheduler's list of timesteps; None where it has none.

    A list that is made anew at each look is given as numbers, since no two of its tensors are the same.
    """
    found = getattr(scheduler, "timesteps", None)
    if not isinstance(found, Tensor) or found is scheduler.timesteps:
        return found
    return found.flatten().tolist()


def own_list(timestep: Any) -> Tensor | None:
    """The list that a timestep is an element of: all of its storage; None for a tensor of another kind."""
    if not isinstance(timestep, Tensor) or timestep.device.type == "meta":
        return None
    single = not any(timestep.stride())  # a slice of one may be of any tensor, as in a training loop
    count = timestep.untyped_storage().nbytes() // timestep.element_size()
    if not single or count < 2 or timestep.storage_offset() >= count:
        return None
    return timestep.detach().as_strided((count,), (1,), storage_offset=0)


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
