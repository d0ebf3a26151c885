"""Which steps compute both passes of classifier-free guidance; the others compute the conditional alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ..checks import check, check_share, check_types
from .steps import ReuseSteps, check_levels, nearest


@dataclass(frozen=True)
class ReuseGuidance:
    """Half calls between whole ones.

    A half call computes the conditional pass and keeps the last known difference between the passes. What
    it gives back has both, so that schedulers and `guidance_rescale` work as ever.

    Only full calls are counted, and a cheap call is whole or half as the full call before it was: so the
    unconditional pass is renewed in all its layers, and its states are as fresh as its difference.

    Attributes:
        every: a full call in so many is whole; 1 leaves nothing out.
        start: share of the run's steps that are whole before any is half, in [0, 1).
        at: in place of `every`, the noise levels of the whole calls, as training timesteps: of a run's full
            steps the nearest to each is whole.

    Raises:
        TypeError, ValueError: a setting has a wrong type or value.
    """

    name: ClassVar[str] = "reuse"

    every: int = 2
    start: float = 0.0
    at: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        check_types(self)
        check("every", self.every, self.every >= 1, "pass 2 (each second full call is whole) or more, or 1")
        check_share("start", self.start, below_one=True)
        if self.at is not None:
            object.__setattr__(self, "at", check_levels("at", self.at))
            ok = self.every == type(self).every
            check("every", self.every, ok, "`at` names the whole calls: leave every out")

    def whole(self, levels: Sequence[float], full: Sequence[bool]) -> list[bool]:
        """Whether each step of a run on these noise levels is whole, where these are full."""
        begin = round(self.start * len(levels))
        counted = [i for i in range(len(levels)) if full[i]]
        late = [i for i in counted if i >= begin]
        if self.at is None:
            whole = set(late[:: self.every])
        else:
            whole = nearest(self.at, levels, counted) | {counted[0]}
        whole |= set(counted) - set(late)
        result: list[bool] = []
        for i in range(len(levels)):
            result.append(i in whole if full[i] else result[-1])
        return result


def check_renewed(steps: ReuseSteps | None, guidance: ReuseGuidance | None) -> None:
    """Raise ValueError for a plan whose unconditional pass is computed in a run's first call alone."""
    if guidance is None or guidance.at is None:
        return
    whole = set(guidance.at)
    if steps is not None and steps.at is not None:
        whole = {steps.at[i] for i in nearest(guidance.at, steps.at, range(len(steps.at)))}
    first = max(steps.at if steps is not None and steps.at is not None else guidance.at)
    way_out = "the unconditional pass would never be renewed: name a later level too, where a step is full"
    check("at", guidance.at, bool(whole - {first}), way_out)
