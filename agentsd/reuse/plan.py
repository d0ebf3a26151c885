"""What each step of a run computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..attention.residual import PLAIN, SHARE, ResidualSharing
from .guidance import ReuseGuidance
from .steps import ReuseSteps


@dataclass(frozen=True)
class Kind:
    """What a call computes.

    Attributes:
        full: all layers; else the last ones.
        whole: both passes of guidance, where there is guidance; else the conditional one.
        attention: what the patched layers compute (`agentsd.attention.residual`).
    """

    full: bool = True
    whole: bool = True
    attention: str = PLAIN

    @property
    def symbol(self) -> str:
        """F or f for a full or a cheap call of both passes, H or h of the conditional one."""
        return ("F" if self.full else "f") if self.whole else ("H" if self.full else "h")


WHOLE = Kind()


def plan_run(
    steps: ReuseSteps | None,
    guidance: ReuseGuidance | None,
    levels: Sequence[float],
    residual: ResidualSharing | None = None,
) -> dict[float, Kind]:
    """The kind of each step by its noise level; the levels come in the run's order and may repeat."""
    levels = list(dict.fromkeys(levels))
    full = [True] * len(levels) if steps is None else steps.full(levels)
    whole = [True] * len(levels) if guidance is None else guidance.whole(levels, full)
    attention = [PLAIN] * len(levels) if residual is None else residual.plan(full, whole)
    kinds = map(Kind, full, whole, attention)
    return dict(zip(levels, kinds, strict=True))


def tell(symbols: str, corrected: int = 0, attention: Sequence[str] = ()) -> str:
    """A line of a run's calls and their counts, and of their attention where residuals are shared."""
    if not symbols:
        return "no call yet"
    names = {"F": "full", "f": "cheap", "H": "full, conditional pass alone", "h": "cheap, conditional alone"}
    counts = [f"{symbols.count(symbol)} {name}" for symbol, name in names.items() if symbol in symbols]
    if corrected:
        counts.append(f"{corrected} corrected")
    line = f"{symbols}  ({len(symbols)} calls: {'; '.join(counts)})"
    if shared := attention.count(SHARE):
        letters = "".join("s" if kind == SHARE else "a" for kind in attention)
        line += f"; attention {letters}  ({shared} with a shared residual)"
    return line
