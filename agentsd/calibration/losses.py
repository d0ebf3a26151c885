"""What a cached or conditional-only step loses, by what it is made from: measured on recorded runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..cache.conditional import difference_of
from ..cache.skipped import SkippedLayers
from ..cache.states import States
from ..hosts.schedulers import training_sigma
from .recording import Call, cached_step


class Losses:
    """Mean squares of the change of the guided output, summed over the recorded runs.

    Args:
        guidance_scale: of the recorded runs; None where a batch has no two passes.
        max_age: steps from a cached step back to the last computed one, at most; between two computed ones
            there is one more.
        max_kept: steps from a conditional-only step back to the last guided one, at most.
    """

    def __init__(self, guidance_scale: float | None, max_age: int, max_kept: int) -> None:
        self._scale = guidance_scale
        self.max_age, self.max_kept = max_age, max_kept
        self._sums: dict[tuple[int, str, tuple[int, ...], int], float] = {}

    def of(self, step: int, symbol: str, computed: tuple[int, ...], guided: int) -> float:
        """What a call loses (as `program.Error`).

        s is one that is not made, in a skipped step; b is a cached one, corrected by the second of
        `computed`.
        """
        if symbol == "F":
            return 0.0
        if symbol in "fsb":
            guided = -1
        return self._sums[step, symbol, () if symbol == "H" else computed, guided]

    def pairs(self, step: int) -> Iterator[tuple[int, ...]]:
        """The last computed steps that a cached step of a step can have: one, or two in their order."""
        for last in range(max(0, step - self.max_age), step):
            yield (last,)
            for before in range(max(0, last - self.max_age - 1), last):
                yield before, last

    def around(self, step: int, count: int) -> Iterator[tuple[int, int]]:
        """The computed steps before and after that a corrected cached step of a step can have."""
        for last in range(max(0, step - self.max_age), step):
            for after in range(step + 1, min(count, last + self.max_age + 2)):
                yield last, after

    def measure(
        self, calls: Sequence[Call], place: int, unet: Any, skipped: SkippedLayers
    ) -> list[list[Any]]:
        """Rows of what the call at a place of a run would lose, for `add`.

        The state that a cached step starts from is made of recorded ones, and the recorded latents are kept:
        a call's own error is seen, not what the errors before it do. The unconditional pass is taken to be
        computed in full where the conditional one was; after conditional-only steps its line goes through
        older steps.
        """
        call = calls[place]
        last_of = {call.step: call for call in calls}  # of repeated steps the later call's state
        changes = {
            computed: self.change(call, [last_of[step] for step in computed], unet, skipped)
            for computed in self.pairs(call.step)
        }
        lost = {computed: mean_square(self.guided(change)) for computed, change in changes.items()}
        rows = [[call.step, "f", computed, -1, lost[computed]] for computed in changes]
        for computed in changes:
            kept = _continued([(last_of[step].level, last_of[step].sample) for step in computed], call.level)
            rows.append([call.step, "s", computed, -1, mean_square(self.guided(kept - call.sample))])
        for computed in self.around(call.step, calls[-1].step + 1):
            change = self.change(call, [last_of[step] for step in computed], unet, skipped)
            rows.append([call.step, "b", computed, -1, mean_square(self.guided(change))])
        return rows if self._scale is None else rows + list(self._halves(call, last_of, changes))

    def add(self, rows: Sequence[Sequence[Any]]) -> None:
        """Take in what `measure` found of a call."""
        for step, symbol, computed, guided, lost in rows:
            key = step, symbol, tuple(computed), guided
            self._sums[key] = self._sums.get(key, 0.0) + lost

    def change(self, call: Call, computed: Sequence[Call], unet: Any, skipped: SkippedLayers) -> Tensor:
        """(B, C, H, W) what a cached step changes, made from the states of these computed ones."""
        hidden = _continued([(one.level, one.hidden) for one in computed], call.level)
        return cached_step(unet, skipped, call.given, hidden) - call.sample

    def guided(self, output: Tensor) -> Tensor:
        """What the sampler gets of an output (B, C, H, W): where there is guidance, half of it."""
        if self._scale is None:
            return output
        without, with_prompt = output.chunk(2)
        return torch.lerp(without, with_prompt, self._scale)

    def _halves(
        self, call: Call, last_of: dict[int, Call], changes: dict[tuple[int, ...], Tensor]
    ) -> Iterator[list[Any]]:
        assert self._scale is not None
        true = difference_of(call.sample)
        for guided in range(max(0, call.step - self.max_kept), call.step):
            kept = (self._scale - 1) * (difference_of(last_of[guided].sample) - true)
            yield [call.step, "H", (), guided, mean_square(kept)]
            for computed, change in changes.items():
                if guided < computed[-1]:
                    yield [call.step, "h", computed, guided, mean_square(change.chunk(2)[1] + kept)]


def _continued(known: Sequence[tuple[float, Tensor]], level: float) -> Tensor:
    """What these tensors, by their noise levels, come to at another: the last, or the line of two."""
    states = States(1, len(known))
    for at, state in known:
        states.keep(training_sigma(at), state)
    return states.between(training_sigma(level))


def mean_square(values: Tensor) -> float:
    """Of all numbers."""
    return float(values.float().square().mean())
