"""Which steps compute both passes of classifier-free guidance; the others compute the conditional alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..checks import check, check_share, check_types
from .steps import StepCache, check_levels, nearest


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
        computed_timesteps: in place of `interval`, the noise levels of the guided steps, as training
            timesteps: of a run's computed steps the nearest to each is guided.

    Raises:
        TypeError, ValueError: a setting has a wrong type or value.
    """

    interval: int = 2
    start: float = 0.0
    computed_timesteps: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        check_types(self)
        way_out = "pass 2 (each second computed step is guided) or more, or 1"
        check("interval", self.interval, self.interval >= 1, way_out)
        check_share("start", self.start, below_one=True)
        if self.computed_timesteps is not None:
            levels = check_levels("computed_timesteps", self.computed_timesteps)
            object.__setattr__(self, "computed_timesteps", levels)
            ok = self.interval == type(self).interval
            way_out = "computed_timesteps names the guided steps: leave interval out"
            check("interval", self.interval, ok, way_out)

    def guided(self, levels: Sequence[float], computed: Sequence[bool]) -> list[bool]:
        """Whether each step of a run on these noise levels is guided, where these are computed."""
        begin = round(self.start * len(levels))
        counted = [i for i in range(len(levels)) if computed[i]]
        late = [i for i in counted if i >= begin]
        if self.computed_timesteps is None:
            guided = set(late[:: self.interval])
        else:
            guided = nearest(self.computed_timesteps, levels, counted) | {counted[0]}
        guided |= set(counted) - set(late)
        result: list[bool] = []
        for i in range(len(levels)):
            result.append(i in guided if computed[i] else result[-1])
        return result


def check_renewed(steps: StepCache | None, guidance: GuidanceCache | None) -> None:
    """Raise ValueError for a plan whose unconditional pass is computed in a run's first step alone."""
    if guidance is None or guidance.computed_timesteps is None:
        return
    wanted, computed = guidance.computed_timesteps, steps.computed_timesteps if steps is not None else None
    guided = set(wanted)
    if computed is not None:
        guided = {computed[i] for i in nearest(wanted, computed, range(len(computed)))}
    first = max(computed if computed is not None else wanted)
    way_out = "the unconditional pass would never be renewed: name a later level too, whose step is computed"
    check("computed_timesteps", wanted, bool(guided - {first}), way_out)
