"""What a call loses that is cheap or half, by what it is made from: measured on recorded baseline calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..hosts.schedulers import training_sigma
from ..reuse.halves import difference_of
from ..reuse.left_out import LeftOut
from ..reuse.states import States
from .recording import Call, cheap_call


class Losses:
    """Mean squares of the change of the guided output, summed over the recorded runs.

    Args:
        guidance_scale: of the recorded runs; None where a batch has no two passes.
        max_age: steps from a cheap call back to the last full one, at most; between two full ones there is
            one more.
        max_kept: steps from a half call back to the last whole one, at most.
    """

    def __init__(self, guidance_scale: float | None, max_age: int, max_kept: int) -> None:
        self._scale = guidance_scale
        self.max_age, self.max_kept = max_age, max_kept
        self._sums: dict[tuple[int, str, tuple[int, ...], int], float] = {}

    def of(self, step: int, symbol: str, fulls: tuple[int, ...], whole: int) -> float:
        """What a call loses (as `program.Error`).

        s is one that is not made, in a step left out; b is a cheap one, corrected by the second of `fulls`.
        """
        if symbol == "F":
            return 0.0
        if symbol in "fsb":
            whole = -1
        return self._sums[step, symbol, () if symbol == "H" else fulls, whole]

    def pairs(self, step: int) -> Iterator[tuple[int, ...]]:
        """The last full steps that a cheap call of a step can have: one, or two in their order."""
        for last in range(max(0, step - self.max_age), step):
            yield (last,)
            for before in range(max(0, last - self.max_age - 1), last):
                yield before, last

    def around(self, step: int, count: int) -> Iterator[tuple[int, int]]:
        """The full steps before and after that a corrected cheap call of a step can have."""
        for last in range(max(0, step - self.max_age), step):
            for after in range(step + 1, min(count, last + self.max_age + 2)):
                yield last, after

    def measure(self, calls: Sequence[Call], place: int, unet: Any, left_out: LeftOut) -> list[list[Any]]:
        """Rows of what the call at a place of a run would lose, for `add`.

        The state that a cheap call starts from is made of recorded ones, and the recorded latents are kept:
        a call's own error is seen, not what the errors before it do. The unconditional pass is taken to be
        computed in full where the conditional one was; after half calls its line goes through older steps.
        """
        call = calls[place]
        last_of = {call.step: call for call in calls}  # of repeated steps the later call's state
        changes = {
            fulls: self.change(call, [last_of[step] for step in fulls], unet, left_out)
            for fulls in self.pairs(call.step)
        }
        lost = {fulls: mean_square(self.guided(change)) for fulls, change in changes.items()}
        rows = [[call.step, "f", fulls, -1, lost[fulls]] for fulls in changes]
        for fulls in changes:
            kept = _continued([(last_of[step].level, last_of[step].sample) for step in fulls], call.level)
            rows.append([call.step, "s", fulls, -1, mean_square(self.guided(kept - call.sample))])
        for fulls in self.around(call.step, calls[-1].step + 1):
            change = self.change(call, [last_of[step] for step in fulls], unet, left_out)
            rows.append([call.step, "b", fulls, -1, mean_square(self.guided(change))])
        return rows if self._scale is None else rows + list(self._halves(call, last_of, changes))

    def add(self, rows: Sequence[Sequence[Any]]) -> None:
        """Take in what `measure` found of a call."""
        for step, symbol, fulls, whole, lost in rows:
            key = step, symbol, tuple(fulls), whole
            self._sums[key] = self._sums.get(key, 0.0) + lost

    def change(self, call: Call, fulls: Sequence[Call], unet: Any, left_out: LeftOut) -> Tensor:
        """(B, C, H, W) what a cheap call changes, made from the states of these full ones."""
        hidden = _continued([(full.level, full.hidden) for full in fulls], call.level)
        return cheap_call(unet, left_out, call.given, hidden) - call.sample

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
        for whole in range(max(0, call.step - self.max_kept), call.step):
            kept = (self._scale - 1) * (difference_of(last_of[whole].sample) - true)
            yield [call.step, "H", (), whole, mean_square(kept)]
            for fulls, change in changes.items():
                if whole < fulls[-1]:
                    yield [call.step, "h", fulls, whole, mean_square(change.chunk(2)[1] + kept)]


def _continued(known: Sequence[tuple[float, Tensor]], level: float) -> Tensor:
    """What these tensors, by their noise levels, come to at another: the last, or the line of two."""
    states = States(1, len(known))
    for at, state in known:
        states.keep(training_sigma(at), state)
    return states.between(training_sigma(level))


def mean_square(values: Tensor) -> float:
    """Of all numbers."""
    return float(values.float().square().mean())
