"""What calibration runs: named recipes, and each attention beside each caching of steps."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

from agentsd import Agents, Downsample, Phases, Recipe, ResidualSharing, StepCache
from agentsd.recipe import FAST

INTERVALS = ((2, None), (2, 4), (2, 6), (3, None), (3, 6), (4, None))
"""Of step caching, from careful to bold: one full step in so many, and at the run's end."""
_STEPS = [
    StepCache(n, warmup_steps=warm, late_interval=late) for warm, (n, late) in product((3, 5), INTERVALS)
]
_KEYS = Downsample(4, at_most=None)
_AGENTS = Phases(Agents(), _KEYS)

CANDIDATES = (
    FAST,
    replace(FAST, attention=_AGENTS),
    *(
        Recipe(attention, steps=steps, residual=ResidualSharing(1 if steps else 2) if attention else None)
        for attention, steps in product((None, _KEYS, _AGENTS), (None, *_STEPS))
        if attention or steps
    ),
)
