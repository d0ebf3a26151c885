"""Which steps compute both passes of classifier-free guidance; the others compute the conditional alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..checks import check, check_share, check_types


@dataclass(frozen=True)
class GuidanceCache:
    """Conditional-only steps between guided ones.

    A conditional-only step computes the conditional pass and keeps the last known difference between the
    passes. What it gives back has both, so that schedulers and `guidance_rescale` work as ever.

    Only computed steps are counted, and a cached step is guided or conditional-only as the computed step
    before it was: so the unconditional pass is renewed in all its layers, and its states are as fresh as its
    difference.

    Attributes:
        interval: a computed step in so many is guided; 1 caches none.
        start: share of the run's steps that are guided before any is conditional-only, in [0, 1).

    Raises:
        TypeError, ValueError: a setting has a wrong type or value.
    """

    interval: int = 2
    start: float = 0.0

    def __post_init__(self) -> None:
        check_types(self)
        way_out = "pass 2 (each second computed step is guided) or more, or 1"
        check("interval", self.interval, self.interval >= 1, way_out)
        check_share("start", self.start, below_one=True)

    def guided(self, computed: Sequence[bool]) -> list[bool]:
        """Whether each step of a run is guided, where these are computed."""
        begin, late, result = round(self.start * len(computed)), 0, [True]
        for i, all_layers in enumerate(computed):
            result.append(result[-1])
            if all_layers:
                result[-1] = i < begin or late % self.interval == 0
                late += i >= begin
        return result[1:]
