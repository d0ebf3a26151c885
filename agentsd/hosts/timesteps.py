"""Where in its run a U-Net call is: read from the timestep, so that no count of calls can go wrong."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

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
    """

    def __init__(self, early_frac: float) -> None:
        self.early_frac = early_frac
        self._source: Tensor | None = None  # held, so that no other list gets its address
        self._version = -1
        self._list: Sequence[float] = ()
        self._threshold = math.inf
        self._place = -1
        self._stride = 1
        self._previous = math.nan
        self.guesses = False
        """Whether no scheduler's list was known of the last call."""

    @property
    def levels(self) -> list[float]:
        """The list that the last call was placed by."""
        return list(self._list)

    @property
    def place(self) -> int:
        """The last call's place in that list."""
        return self._place

    @property
    def stride(self) -> int:
        """Places from one call to the next: 1, or more where a caller skips timesteps."""
        return self._stride

    @property
    def source(self) -> Tensor | None:
        """The tensor that the list was read from."""
        return self._source

    def read(self, timestep: Any, scheduler: Any = None) -> Step:
        """Read one call.

        Args:
            timestep: the U-Net's second argument: a number or a tensor; of a batch of different timesteps
                the largest one counts.
            scheduler: a scheduler to fall back on.
        """
        source = _own_list(timestep)
        known = source if source is not None else getattr(scheduler, "timesteps", None)
        renewed = self._look_up(known, timestep if source is not None else None)
        before = self._place
        if source is not None:
            self._place = timestep.storage_offset()
            t = self._list[self._place]
        else:
            t = float(timestep.max() if isinstance(timestep, Tensor) else timestep)
            self._place = self._nearest(t, before if not renewed else -1)
        off_list = abs(self._list[self._place] - t) > _NEAR * max(1.0, abs(t))
        first_call = renewed or self._place < before
        repeated_timestep = not first_call and t == self._previous
        moved = self._place - before
        skips_timesteps = not first_call and moved not in (0, self._stride)
        if first_call or skips_timesteps:
            self._stride = moved if skips_timesteps else 1
        self._previous = t
        early = t > self._threshold + _NEAR
        ahead = self._list[self._place :]
        self.guesses = known is None
        late_run = first_call and self.early_frac > 0 and not any(x > self._threshold + _NEAR for x in ahead)
        return Step(
            t, early, first_call, repeated_timestep, late_run and not self.guesses, off_list, skips_timesteps
        )

    def _look_up(self, known: Any, element: Tensor | None) -> bool:
        """Read a list again if it may have changed; returns whether another run has begun by that."""
        if isinstance(known, Tensor):
            counted = known if element is None else element  # an element counts its list's changes
            version = 0 if counted.is_inference() else counted._version
            if _same(known, self._source) and version == self._version:
                return False
            self._source, self._version = known, version
            values = known.double().flatten().tolist()
            if element is None and values == self._list:  # a scheduler may make its list anew at each look
                return False
        else:
            self._source = None
            values = list(TRAINING_TIMESTEPS if known is None else map(float, known))
            if values == self._list:
                return False
        self._list = values
        self._threshold = early_threshold(values, self.early_frac)
        return True

    def _nearest(self, t: float, start: int) -> int:
        """The place of a timestep: the next one after `start`, or that one again, or else the first."""
        near = [i for i, x in enumerate(self._list) if abs(x - t) <= _NEAR * max(1.0, abs(t))]
        for place in (start + 1, start):
            if place in near:
                return place
        if near:
            return next((i for i in near if i > start), near[0])
        return min(range(len(self._list)), key=lambda i: abs(self._list[i] - t))


def _same(one: Tensor, other: Tensor | None) -> bool:
    if other is None:
        return False
    return one.data_ptr() == other.data_ptr() and one.shape == other.shape and one.dtype == other.dtype


def _own_list(timestep: Any) -> Tensor | None:
    """The list that a timestep is an element of, or None."""
    if not isinstance(timestep, Tensor) or timestep.device.type == "meta":
        return None
    single = not any(timestep.stride())  # a slice of one may be of any tensor, as in a training loop
    storage = timestep.untyped_storage()
    count = storage.nbytes() // timestep.element_size()
    if not single or count < 2 or timestep.storage_offset() >= count:
        return None
    return torch.empty(0, dtype=timestep.dtype, device=timestep.device).set_(storage)
