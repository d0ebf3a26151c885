"""Which denoising steps are early: read from the timestep, so that no count of calls can go wrong."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# What a bare U-Net is scheduled by: its training timesteps, noisiest first.
TRAINING_TIMESTEPS = tuple(float(t) for t in range(999, -1, -1))


def early_threshold(timesteps: Sequence[float], early_frac: float) -> float:
    """The timestep that every early one is greater than.

    Args:
        timesteps: the scheduler's whole list, noisiest first; repeats (PLMS, Heun) count once.
        early_frac: share of the steps that are early.
    """
    unique = list(dict.fromkeys(timesteps))
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
        opens: the call is a run's first.
        repeats: it has the timestep of the call before, in the same run (PLMS, Heun).
        opens_without_early: and the run's scheduler has no early step left.
    """

    timestep: float
    early: bool
    opens: bool
    repeats: bool
    opens_without_early: bool


class StepReader:
    """Turns the timestep of a U-Net call into a `Step`."""

    def __init__(self, early_frac: float) -> None:
        self.early_frac = early_frac
        self._source: object = None
        self._version = -1
        self._list: Sequence[float] = TRAINING_TIMESTEPS
        self._threshold = early_threshold(TRAINING_TIMESTEPS, early_frac)
        self._previous = -math.inf

    def read(self, timestep: Any, scheduler: Any) -> Step:
        """Read one call.

        Args:
            timestep: the U-Net's second argument: a number or a tensor; of a batch of different timesteps
                the largest one counts.
            scheduler: the pipeline's scheduler, or None for a bare U-Net.
        """
        renewed = self._look_up(scheduler)
        t = self._value(timestep)
        opens = renewed or t > self._previous
        repeats = not opens and t == self._previous
        self._previous = t
        early = t > self._threshold
        late_run = opens and not early and self.early_frac > 0 and scheduler is not None
        return Step(t, early, opens, repeats, late_run)

    def _look_up(self, scheduler: Any) -> bool:
        """Read the scheduler's list again if it may have changed; returns whether it has."""
        source = getattr(scheduler, "timesteps", None)
        version = source._version if isinstance(source, Tensor) and not source.is_inference() else 0
        if source is self._source and version == self._version:
            return False
        self._source, self._version = source, version
        values = [] if source is None else torch.as_tensor(source).double().flatten().tolist()
        before, self._list = self._list, values or TRAINING_TIMESTEPS
        self._threshold = early_threshold(self._list, self.early_frac)
        return self._list != before

    def _value(self, timestep: Any) -> float:
        if not isinstance(timestep, Tensor):
            return float(timestep)
        source = self._source
        if timestep.device.type != "cpu" and timestep.numel() == 1 and isinstance(source, Tensor):
            # Pipelines pass an element of scheduler.timesteps: its address tells which, without a wait
            # for the device.
            place, rest = divmod(timestep.data_ptr() - source.data_ptr(), source.element_size())
            if (
                source.device == timestep.device
                and source.is_contiguous()
                and not rest
                and 0 <= place < source.numel()
            ):
                return self._list[place]
        return float(timestep.max())
