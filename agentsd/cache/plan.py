"""What each step of a run computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..attention.residual import PLAIN, SHARE, ResidualSharing
from .guidance import GuidanceCache
from .steps import StepCache


@dataclass(frozen=True)
class StepKind:
    """What a call computes.

    Attributes:
        computed: all layers; else the last ones.
        guided: both passes of guidance, where there is guidance; else the conditional one.
        attention: what the patched layers compute (`agentsd.attention.residual`).
    """

    computed: bool = True
    guided: bool = True
    attention: str = PLAIN

    @property
    def letter(self) -> str:
        """F or f for a computed or a cached step of both passes, H or h of the conditional one."""
        if self.guided:
            return "F" if self.computed else "f"
        return "H" if self.computed else "h"


COMPUTED = StepKind()
_NAMES = {
    "F": "computed",
    "f": "cached",
    "H": "computed, conditional-only",
    "h": "cached, conditional-only",
}


def plan_run(
    steps: StepCache | None,
    guidance: GuidanceCache | None,
    timesteps: Sequence[float],
    residual: ResidualSharing | None = None,
) -> dict[float, StepKind]:
    """The kind of each step by its timestep; the timesteps come in the run's order and may repeat."""
    timesteps = list(dict.fromkeys(timesteps))
    computed = [True] * len(timesteps) if steps is None else steps.computed(len(timesteps))
    guided = [True] * len(timesteps) if guidance is None else guidance.guided(computed)
    attention = [PLAIN] * len(timesteps) if residual is None else residual.plan(computed, guided)
    kinds = map(StepKind, computed, guided, attention)
    return dict(zip(timesteps, kinds, strict=True))


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
