"""What calibration runs: named recipes, and variations of each technique from careful to bold."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

from agentsd import Agents, Downsample, Phases, Recipe, ResidualSharing, StepCache
from agentsd.recipe import FAST, Schedule

INTERVALS = ((2, None), (2, 4), (2, 6), (3, None), (3, 6), (4, None))
"""Of step caching: one computed step in so many, and at the run's end."""
_KEYS = Downsample(4, at_most=None)
_AGENTS = Phases(Agents(), _KEYS)
_OPERATORS: tuple[Schedule, ...] = (_KEYS, _AGENTS)


def _step_caches() -> list[StepCache]:
    spaced = product((2, 3, 5), INTERVALS)
    return [StepCache(interval, warmup_steps=warm, late_interval=late) for warm, (interval, late) in spaced]


def _candidates() -> tuple[Recipe, ...]:
    steps = _step_caches()
    shared = [
        Recipe(attention, steps=cache, residual=ResidualSharing(interval))
        for attention, cache, interval in product(_OPERATORS, [steps[0], *steps[6:10]], (1, 2))
    ]
    alone = [
        Recipe(attention, residual=ResidualSharing(interval))
        for attention, interval in product(_OPERATORS, (2, 3, 4))
    ]
    every = [
        FAST,
        replace(FAST, attention=_AGENTS),
        Recipe(steps=FAST.steps),
        *(Recipe(steps=cache) for cache in steps),
        *shared,
        *alone,
    ]
    return tuple(dict.fromkeys(every))


CANDIDATES = _candidates()
