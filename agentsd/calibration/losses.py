"""What a call loses that is cheap or half, by what it is made from: measured on recorded stock calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

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
        """What a call loses (as `program.Error`)."""
        if symbol == "F":
            return 0.0
        if symbol == "f":
            whole = -1
        return self._sums[step, symbol, () if symbol == "H" else fulls, whole]

    def pairs(self, step: int) -> Iterator[tuple[int, ...]]:
        """The last full steps that a cheap call of a step can have: one, or two in their order."""
        for last in range(max(0, step - self.max_age), step):
            yield (last,)
            for before in range(max(0, last - self.max_age - 1), last):
                yield before, last

    def add(self, calls: Sequence[Call], unet: Any, left_out: LeftOut, tick: Callable[[], None]) -> None:
        """Measure a run's calls.

        The state that a cheap call starts from is made of recorded ones, and the recorded latents are kept:
        a call's own error is seen, not what the errors before it do. The unconditional pass is taken to be
        computed in full where the conditional one was; after half calls its line goes through older steps.
        """
        last_of = {call.step: call for call in calls}  # repeated steps: the later call's state is kept
        for call in calls:
            changes = {
                fulls: self.change(call, [last_of[step] for step in fulls], unet, left_out)
                for fulls in self.pairs(call.step)
            }
            for fulls, change in changes.items():
                self._note(call.step, "f", fulls, -1, self.guided(change))
            if self._scale is not None:
                self._add_half(call, last_of, changes)
            tick()

    def change(self, call: Call, fulls: Sequence[Call], unet: Any, left_out: LeftOut) -> Tensor:
        """(B, C, H, W) what a cheap call changes, made from the states of these full ones."""
        states = States(len(fulls) - 1)
        for full in fulls:
            states.keep(full.level, full.hidden)
        return cheap_call(unet, left_out, call.given, states.at(call.level)) - call.sample

    def guided(self, output: Tensor) -> Tensor:
        """What the sampler gets of an output (B, C, H, W): where there is guidance, half of it."""
        if self._scale is None:
            return output
        without, with_prompt = output.chunk(2)
        return torch.lerp(without, with_prompt, self._scale)

    def _add_half(self, call: Call, last_of: dict[int, Call], changes: dict[tuple[int, ...], Tensor]) -> None:
        assert self._scale is not None
        true = difference_of(call.sample)
        for whole in range(max(0, call.step - self.max_kept), call.step):
            kept = (self._scale - 1) * (difference_of(last_of[whole].sample) - true)
            self._note(call.step, "H", (), whole, kept)
            for fulls, change in changes.items():
                if whole < fulls[-1]:
                    self._note(call.step, "h", fulls, whole, change.chunk(2)[1] + kept)

    def _note(self, step: int, symbol: str, fulls: tuple[int, ...], whole: int, change: Tensor) -> None:
        key = step, symbol, fulls, whole
        self._sums[key] = self._sums.get(key, 0.0) + mean_square(change)


def mean_square(values: Tensor) -> float:
    """Of all numbers."""
    return float(values.float().square().mean())
