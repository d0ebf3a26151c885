"""What each step of a run computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .guidance import ReuseGuidance
from .steps import ReuseSteps


@dataclass(frozen=True)
class Kind:
    """What a call computes.

    Attributes:
        full: all layers; else the last ones.
        whole: both passes of guidance, where there is guidance; else the conditional one.
    """

    full: bool = True
    whole: bool = True

    @property
    def symbol(self) -> str:
        """F or f for a full or a cheap call of both passes, H or h of the conditional one."""
        return ("F" if self.full else "f") if self.whole else ("H" if self.full else "h")


WHOLE = Kind()


def plan_run(
    steps: ReuseSteps | None, guidance: ReuseGuidance | None, levels: Sequence[float]
) -> dict[float, Kind]:
    """The kind of each step by its noise level; the levels come in the run's order and may repeat."""
    levels = list(dict.fromkeys(levels))
    full = [True] * len(levels) if steps is None else steps.full(levels)
    whole = [True] * len(levels) if guidance is None else guidance.whole(levels, full)
    return {level: Kind(*kind) for level, *kind in zip(levels, full, whole, strict=True)}


def tell(symbols: str, corrected: int = 0) -> str:
    """A line of a run's calls and their counts."""
    if not symbols:
        return "no call yet"
    names = {"F": "full", "f": "cheap", "H": "full, conditional pass alone", "h": "cheap, conditional alone"}
    counts = [f"{symbols.count(symbol)} {name}" for symbol, name in names.items() if symbol in symbols]
    if corrected:
        counts.append(f"{corrected} corrected")
    return f"{symbols}  ({len(symbols)} calls: {'; '.join(counts)})"
