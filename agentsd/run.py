"""The runs under way: where in its list of timesteps each is, and what its calls were."""

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
"""What a call is placed by that no scheduler's list is known of, noisiest first."""
_NEAR = 1e-3  # float32 schedules miss their own values by less
_MOST_CALLS = 4096  # of a run, whose kinds are kept: a loop by hand may repeat a timestep for ever
_MOST_RUNS = 8  # that are kept at once, in all threads


class History:
    """What a run's calls were: the kinds of the latest 4,096, and how many cached ones were corrected."""

    def __init__(self) -> None:
        self.kinds: deque[CallKind] = deque(maxlen=_MOST_CALLS)
        self.corrected = 0

    def describe(self) -> str:
        """A line of the calls."""
        letters = "".join(kind.letter for kind in self.kinds)
        attention = "".join("s" if kind.attention == SHARE else "a" for kind in self.kinds)
        return describe(letters, self.corrected, attention)


class Run:
    """A run: calls down one list of timesteps.

    Pipelines pass an element of their scheduler's list, and the element's storage is that list: so the run
    that calls is followed, whichever pipeline it is of. A timestep that is an element of none is looked for
    on the list of the scheduler that is known, and else on the training timesteps.

    Args:
        timing: what the stages of the run go by; None where it has one.

    Attributes:
        timesteps: the list that the last call was placed by.
        index: the last call's place in it.
        stride: places from one call to the next: 1, or more where a caller skips timesteps.
        source: the tensor that the list was read from; held, so that no other list gets its address.
        guesses: no scheduler's list is known.
        scheduler: that has the list, where it is known; it may be gone by now.
        history: what its calls were.
        cache: what they leave for later ones, by a plan; without one the next call plans what is left of it.
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
        """Find where in the run a call is.

        Args:
            latent: (B, ..., H, W) what it is called on.
            timestep: the U-Net's second argument: a number or a tensor; of a batch of different timesteps
                the largest one counts.
            known: the list that a timestep is placed by which is an element of none.

        | the call, `moved` places from the one before         | begins | repeats | jumps |
        |------------------------------------------------------|--------|---------|-------|
        | is on another list, or back on its own (`moved` < 0) | yes    |         |       |
        | is in its place (0), or `stride` further             |        |         |       |
        | has the timestep of the one before (PLMS, Heun)      |        | yes     |       |
        | is elsewhere: `stride` is `moved` from then on       |        |         | yes   |

        It is `off_list` where its timestep is not on the list: its place is that of the nearest.
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
        """Whether no call from the last one on is early, so far as its timesteps are known."""
        return not self.guesses and not any(map(self._is_early, self.timesteps[self.index :]))

    def remark(self, call: Call) -> str:
        """What a user should know of the early steps, so far as a call tells; nothing where all is well."""
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
        """Read a list again if it may have changed; returns whether another run has begun by that."""
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
        """The place of a timestep: the next one after `start`, or that one again, or else the first."""
        near = [i for i, x in enumerate(self.timesteps) if _near(x, t)]
        for index in (start + 1, start, *(i for i in near if i > start), *near):
            if index in near:
                return index
        return min(range(len(self.timesteps)), key=lambda i: abs(self.timesteps[i] - t))

    @property
    def scheduler(self) -> Any:
        """The run's scheduler, while it is in use elsewhere."""
        return self._scheduler()

    def find_scheduler(self, schedulers: Sequence[Any]) -> None:
        """Note which of these has the run's list, if one has."""
        found = [weakref.ref(one) for one in schedulers if holds(one, self.source)]
        self._scheduler = found[0] if found else lambda: None

    @property
    def memories(self) -> dict[Any, Memory]:
        """What its calls left for later ones, by conditions."""
        return {} if self.cache is None else self.cache.memories

    @property
    def is_over(self) -> bool:
        """Whether its scheduler is gone or has another list by now, so that no call of it will come."""
        known = isinstance(self._scheduler, weakref.ref)
        return known and not holds(self.scheduler, self.source)


class Runs:
    """The runs under way on a U-Net. A run is a thread's on one list of timesteps.

    So pipelines that take turns, in threads of their own or in one (asyncio), each have their own.

    Args:
        timing: what their stages go by.
        pipe: what was patched, where that is not the U-Net itself; it is not held.
    """

    def __init__(self, timing: Phases | ByDistance | None, pipe: Any = None) -> None:
        self._timing = timing
        self._pipe = (lambda: None) if pipe is None else weakref.ref(pipe)
        self._runs: dict[
            tuple[int, int], Run
        ] = {}  # by thread and list; the one that was called last comes last
        self._histories: dict[int, History] = {}  # the last of each thread
        self._latest = History()

    def __reduce__(self) -> tuple[Any, ...]:  # a copy begins anew
        return Runs, (self._timing,)

    def __deepcopy__(self, memo: dict[int, Any]) -> Runs:  # where the pipeline is being copied, too, for that
        return Runs(self._timing, memo.get(id(self.pipe)))

    def __iter__(self) -> Iterator[Run]:
        return iter(list(self._runs.values()))

    @property
    def pipe(self) -> Any:
        """What was patched: a pipeline or a wrapper of the model; None where the model was, or it is gone."""
        return self._pipe()

    def place(self, latent: Tensor, timestep: Any) -> tuple[Run, Call]:
        """The run that a call on a latent (B, ..., H, W) is of, and where in it.

        Where a timestep is an element of no list, that of the pipeline's scheduler counts.
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
        self._runs[key] = run  # last: a run that was interrupted while it took a call in is gone
        return run, call

    def _drop(self) -> None:
        """Let go of the runs that are over, before another begins."""
        alive = set(sys._current_frames())  # the ids of the threads that live
        self._histories = {thread: of for thread, of in self._histories.items() if thread in alive}
        live = {key: run for key, run in self._runs.items() if key[0] in alive and not run.is_over}
        self._runs = dict(list(live.items())[1 - _MOST_RUNS :])

    @property
    def history(self) -> History:
        """Of the thread's last run; of the last run of any, where it had none."""
        return self._histories.get(threading.get_ident(), self._latest)

    def end(self, *args: Any, **kwargs: Any) -> None:
        """Let go of the thread's run that was called last; diffusers calls it when a pipeline is done."""
        mine = [key for key in self._runs if key[0] == threading.get_ident()]
        if mine:
            del self._runs[mine[-1]]

    def clear(self) -> None:
        """Let go of all runs, of all threads."""
        self._runs.clear()


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


def list_of(scheduler: Any) -> Any:
    """A scheduler's list of timesteps; None where it has none.

    A list that is made anew at each look is given as numbers, since no two of its tensors are the same.
    """
    found = getattr(scheduler, "timesteps", None)
    if not isinstance(found, Tensor) or found is scheduler.timesteps:
        return found
    return found.flatten().tolist()


def holds(scheduler: Any, timesteps: Tensor | None) -> bool:
    """Whether a tensor is, or is a part of, a scheduler's list of timesteps."""
    own = getattr(scheduler, "timesteps", None)
    if timesteps is None or not isinstance(own, Tensor) or own.device.type == "meta":
        return False
    return own.untyped_storage().data_ptr() == timesteps.untyped_storage().data_ptr()


def schedulers_of(pipe: Any) -> list[Any]:
    """The schedulers among a pipeline's parts, its `scheduler` first; none of a bare model."""
    if pipe is None or isinstance(pipe, Module):
        return []
    first = getattr(pipe, "scheduler", None)
    parts = [part for part in vars(pipe).values() if isinstance(part, SchedulerMixin) and part is not first]
    return parts if first is None else [first, *parts]


def own_list(timestep: Any) -> Tensor | None:
    """The list that a timestep is an element of; None for a tensor of another kind.

    A caller passes one timestep, which alone has to tell whose run it is of, and where in it. An element of
    a list is a view of the list's storage: of [900, 600, 300], 600 is a view at offset 1. So it leads to all
    three, and its offset is its place among them.
    """
    if not isinstance(timestep, Tensor) or timestep.device.type == "meta":
        return None
    single = not any(timestep.stride())  # a slice of one may be of any tensor, as in a training loop
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
