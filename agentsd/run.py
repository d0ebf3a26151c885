"""The runs in progress: where each is in its list of timesteps, and what its calls were."""

from __future__ import annotations

import math
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from diffusers import SchedulerMixin
from torch import Tensor
from torch.nn import Module

from .attention.by_distance import LatentDistance
from .memory import Memory, RunCache
from .plan import SHARE, Call, CallKind, describe
from .recipe import ByDistance, Phases

TRAINING_TIMESTEPS = tuple(float(t) for t in range(999, -1, -1))
"""The list that a call is placed on when no scheduler's list is known, noisiest first."""
_NEAR = 1e-3  # float32 schedules miss their own values by less than this
_MOST_CALLS = 4096  # remembered per run: a hand-written loop may repeat a timestep forever
_MOST_RUNS = 8  # kept at once, over all threads


class History:
    """The kinds of a run's latest 4,096 calls, and how many cached calls were corrected."""

    def __init__(self) -> None:
        self.kinds: deque[CallKind] = deque(maxlen=_MOST_CALLS)
        self.corrected = 0

    def describe(self) -> str:
        """Return the calls as one line of text."""
        letters = "".join(kind.letter for kind in self.kinds)
        attention = "".join("s" if kind.attention == SHARE else "a" for kind in self.kinds)
        return describe(letters, self.corrected, attention)


class Run:
    """One pass down a list of timesteps.

    Pipelines pass an element of their scheduler's list. The element is a view of the list's storage, so it
    identifies the run, whichever pipeline makes the call. Any other timestep is looked up on the list of
    the known scheduler, or else on the training timesteps.

    Args:
        timing: decides the stage of each call; None if the run has only one stage.

    Attributes:
        timesteps: the list on which the last call was placed.
        index: the last call's place in that list.
        stride: places from one call to the next: 1, or more if the caller skips timesteps.
        source: the tensor that the list was read from. It is held so that no other list gets its address.
        guesses: whether no scheduler's list is known.
        scheduler: the scheduler that owns the list, if it is known and still alive.
        history: what the run's calls were.
        cache: what the calls leave for later calls. If it is None, the next call plans the rest of the run.
    """

    def __init__(self, timing: Phases | ByDistance | None = None) -> None:
        self._early_frac = timing.early_frac if isinstance(timing, Phases) else 1.0
        self._distance = LatentDistance(timing.thresholds) if isinstance(timing, ByDistance) else None
        self.timesteps: list[float] = []
        self.index = -1
        self.stride = 1
        self.source: Tensor | None = None
        self.guesses = False
        self._version = -1
        self._threshold = math.inf
        self._previous = math.nan
        self._scheduler: Callable[[], Any] = lambda: None
        self.history = History()
        self.cache: RunCache | None = None

    def place(self, latent: Any, timestep: Any, known: Any = None) -> Call:
        """Find the place of a call in the run.

        Args:
            latent: (B, ..., H, W) the U-Net's input.
            timestep: the U-Net's second argument, a number or a tensor. If a batch holds different
                timesteps, the largest counts.
            known: the list to use if the timestep is not an element of one.

        | the call, `moved` places from the one before         | begins | repeats | jumps |
        |------------------------------------------------------|--------|---------|-------|
        | is on another list, or moves back (`moved` < 0)      | yes    |         |       |
        | stays in its place (0), or moves on by `stride`      |        |         |       |
        | has the timestep of the one before (PLMS, Heun)      |        | yes     |       |
        | moves anywhere else: `stride` becomes `moved`        |        |         | yes   |

        A call is `off_list` if its timestep is not on the list. It then takes the place of the nearest one.
        """
        own, before = own_list(timestep), self.index
        renewed = self._look_up(known if own is None else own, is_own=own is not None)
        if own is not None:
            self.index = timestep.storage_offset()
            t = self.timesteps[self.index]
        else:
            t = float(timestep.max() if isinstance(timestep, Tensor) else timestep)
            self.index = self._nearest(t, -1 if renewed else before)
        begins, moved = renewed or self.index < before, self.index - before
        jumps = not begins and moved not in (0, self.stride)
        if begins:
            self.stride, self.history = 1, History()
        elif jumps:
            self.stride = moved
        repeats, self._previous = not begins and t == self._previous, t
        stage = 0 if self._is_early(t) else 1
        if self._distance is not None:
            stage = self._distance.read(latent, begins, repeats)
        off_list = not _near(self.timesteps[self.index], t)
        return Call(latent, t, self.index, stage, begins, repeats, jumps, off_list)

    @property
    def is_late(self) -> bool:
        """Whether the last call and all that follow are late, as far as the timesteps are known."""
        return not self.guesses and not any(map(self._is_early, self.timesteps[self.index :]))

    def remark(self, call: Call) -> str:
        """Return what the user should know about the early steps; "" if all is well."""
        if not 0 < self._early_frac < 1:
            return ""
        if call.begins and self.is_late:
            return (
                "this run has no early step (img2img of low strength has none), so what runs early "
                f"never runs in it; raise early_frac={self._early_frac:g} (1.0: every step)"
            )
        if call.off_list:
            return (
                f"timestep {call.timestep:g} is not one of the scheduler's, so early steps are "
                "guessed; pass an element of scheduler.timesteps to the U-Net, or apply agentsd to the "
                "pipeline"
            )
        return ""

    def _is_early(self, timestep: float) -> bool:
        return timestep > self._threshold + _NEAR

    def _look_up(self, known: Any, is_own: bool) -> bool:
        """Read the list again if it may have changed; return whether that starts another run."""
        self.guesses = known is None
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
        self._threshold = early_threshold(values, self._early_frac)
        return True

    def _nearest(self, t: float, start: int) -> int:
        """Return the place of a timestep: the one after `start` if it fits, else `start`, else the first."""
        near = [i for i, x in enumerate(self.timesteps) if _near(x, t)]
        for index in (start + 1, start, *(i for i in near if i > start), *near):
            if index in near:
                return index
        return min(range(len(self.timesteps)), key=lambda i: abs(self.timesteps[i] - t))

    @property
    def scheduler(self) -> Any:
        """The run's scheduler, while something else holds it."""
        return self._scheduler()

    def find_scheduler(self, schedulers: Sequence[Any]) -> None:
        """Remember which of these schedulers owns the run's list, if any does."""
        found = [weakref.ref(one) for one in schedulers if holds(one, self.source)]
        self._scheduler = found[0] if found else lambda: None

    @property
    def memories(self) -> dict[Any, Memory]:
        """What the calls left for later calls, by conditions."""
        return {} if self.cache is None else self.cache.memories

    @property
    def is_over(self) -> bool:
        """Whether the scheduler is gone or has a new list, so that no further call can come."""
        known = isinstance(self._scheduler, weakref.ref)
        return known and not holds(self.scheduler, self.source)


class Runs:
    """The runs in progress on a U-Net, one for each thread and list of timesteps.

    So pipelines that take turns on one U-Net, in threads or in one thread (asyncio), don't share a run.

    Args:
        timing: decides the stage of each call.
        pipe: what was patched, if not the U-Net itself. Only a weak reference is kept.
    """

    def __init__(self, timing: Phases | ByDistance | None, pipe: Any = None) -> None:
        self._timing = timing
        self._pipe = (lambda: None) if pipe is None else weakref.ref(pipe)
        self._runs: dict[tuple[int, int], Run] = {}  # by thread and list, the latest last
        self._histories: dict[int, History] = {}  # the last one of each thread
        self._latest = History()

    def __reduce__(self) -> tuple[Any, ...]:  # a copy starts without runs
        return Runs, (self._timing,)

    def __deepcopy__(self, memo: dict[int, Any]) -> Runs:  # of the copied pipeline, if it is copied as well
        return Runs(self._timing, memo.get(id(self.pipe)))

    def __iter__(self) -> Iterator[Run]:
        return iter(list(self._runs.values()))

    @property
    def pipe(self) -> Any:
        """The pipeline or wrapper that was patched; None if it was the U-Net itself, or if it is gone."""
        return self._pipe()

    def place(self, latent: Tensor, timestep: Any) -> tuple[Run, Call]:
        """Return the run that a call on a latent (B, ..., H, W) belongs to, and its place in it.

        If the timestep is not an element of a list, the list of the pipeline's scheduler is used.
        """
        schedulers = schedulers_of(self.pipe)
        listed = own_list(timestep)
        if listed is None and schedulers:
            listed = list_of(schedulers[0])
        thread = threading.get_ident()
        key = thread, listed.data_ptr() if isinstance(listed, Tensor) else 0
        run = self._runs.pop(key, None)
        if run is None:
            self._drop()
            run = Run(self._timing)
        call = run.place(latent, timestep, listed)
        self._latest = self._histories[thread] = run.history
        if call.begins:
            run.find_scheduler(schedulers)
        self._runs[key] = run  # last, so that an interruption on the way leaves no half-updated run behind
        return run, call

    def _drop(self) -> None:
        """Forget the runs that are over, before another begins."""
        alive = set(sys._current_frames())  # ids of the living threads
        self._histories = {thread: of for thread, of in self._histories.items() if thread in alive}
        live = {key: run for key, run in self._runs.items() if key[0] in alive and not run.is_over}
        self._runs = dict(list(live.items())[1 - _MOST_RUNS :])

    @property
    def history(self) -> History:
        """The history of this thread's last run, or of any thread's if it had none."""
        return self._histories.get(threading.get_ident(), self._latest)

    def end(self, *args: Any, **kwargs: Any) -> None:
        """Forget this thread's latest run; diffusers calls this when a pipeline is done."""
        mine = [key for key in self._runs if key[0] == threading.get_ident()]
        if mine:
            del self._runs[mine[-1]]

    def clear(self) -> None:
        """Forget all runs of all threads."""
        self._runs.clear()


def early_threshold(timesteps: Sequence[float], early_frac: float) -> float:
    """Return the timestep above which steps are early.

    Args:
        timesteps: the scheduler's whole list; repeats (PLMS, Heun) count once.
        early_frac: share of the steps that are early.
    """
    unique = sorted(set(timesteps), reverse=True)
    last = round(early_frac * len(unique))
    if last == 0:
        return math.inf
    return unique[last] if last < len(unique) else -math.inf


def list_of(scheduler: Any) -> Any:
    """Return a scheduler's list of timesteps; None if it has none.

    A scheduler may make a new tensor at each access. Then the list is returned as numbers.
    """
    found = getattr(scheduler, "timesteps", None)
    if not isinstance(found, Tensor) or found is scheduler.timesteps:
        return found
    return found.flatten().tolist()


def holds(scheduler: Any, timesteps: Tensor | None) -> bool:
    """Return whether a tensor is a scheduler's list of timesteps, or part of it."""
    own = getattr(scheduler, "timesteps", None)
    if timesteps is None or not isinstance(own, Tensor) or own.device.type == "meta":
        return False
    return own.untyped_storage().data_ptr() == timesteps.untyped_storage().data_ptr()


def schedulers_of(pipe: Any) -> list[Any]:
    """Return the schedulers among a pipeline's parts, its `scheduler` first; a bare model has none."""
    if pipe is None or isinstance(pipe, Module):
        return []
    first = getattr(pipe, "scheduler", None)
    parts = [part for part in vars(pipe).values() if isinstance(part, SchedulerMixin) and part is not first]
    return parts if first is None else [first, *parts]


def own_list(timestep: Any) -> Tensor | None:
    """Return the list that a timestep is an element of; None if it is not an element of one.

    The U-Net gets one timestep and nothing else, so that alone must tell which run the call belongs to.
    It can: an element of a tensor is a view of the tensor's storage. In [900, 600, 300], 600 is a view at
    offset 1. It leads to the whole list, and the offset is its place.
    """
    if not isinstance(timestep, Tensor) or timestep.device.type == "meta":
        return None
    single = not any(timestep.stride())  # a slice of length 1 may come from any tensor, as in training
    count = timestep.untyped_storage().nbytes() // timestep.element_size()
    if not single or count < 2 or timestep.storage_offset() >= count:
        return None
    return timestep.detach().as_strided((count,), (1,), storage_offset=0)


def _near(listed: float, timestep: float) -> bool:
    return abs(listed - timestep) <= _NEAR * max(1.0, abs(timestep))


def _same(one: Tensor, other: Tensor | None) -> bool:
    if other is None:
        return False
    return one.data_ptr() == other.data_ptr() and one.shape == other.shape and one.dtype == other.dtype
