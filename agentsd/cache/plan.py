"""What each step of a run computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..attention.residual import OPERATOR, SHARE, ResidualSharing
from .steps import StepCache


@dataclass(frozen=True)
class StepKind:
    """What a call computes.

    Attributes:
        computed: all layers; else the last ones.
        attention: what the patched layers compute (`agentsd.attention.residual`).
    """

    computed: bool = True
    attention: str = OPERATOR

    @property
    def letter(self) -> str:
        """F or f for a computed or a cached step."""
        return "F" if self.computed else "f"


COMPUTED = StepKind()
_NAMES = {"F": "computed", "f": "cached"}


def plan_run(
    steps: StepCache | None, step_of_call: Sequence[float], residual: ResidualSharing | None = None
) -> list[StepKind]:
    """The kind of each call of a run, in its order; calls of one step (PLMS, Heun) are of one kind."""
    number = {step: i for i, step in enumerate(dict.fromkeys(step_of_call))}
    computed = [True] * len(number) if steps is None else steps.computed(len(number))
    attention = [OPERATOR] * len(number) if residual is None else residual.plan(computed)
    kinds = list(map(StepKind, computed, attention))
    return [kinds[number[step]] for step in step_of_call]


def describe(letters: str, corrected: int = 0, attention: Sequence[str] = ()) -> str:
    """A line of a run's steps, a letter each, and their counts; also of attention where it is shared."""
    if not letters:
        return "no call yet"
    counts = [f"{letters.count(letter)} {name}" for letter, name in _NAMES.items() if letter in letters]
    if corrected:
        counts.append(f"{corrected} corrected")
    line = f"{letters}  ({len(letters)} calls: {'; '.join(counts)})"
    if shared := attention.count(SHARE):
        of = "".join("s" if kind == SHARE else "a" for kind in attention)
        line += f"; attention {of}  ({shared} with a shared residual)"
    return line
