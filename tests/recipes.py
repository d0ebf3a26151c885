"""Recipes of many tests."""

from dataclasses import replace

from agentsd import Agents, Downsample, Phases, Recipe, ResidualSharing, StepCache
from agentsd.recipe import FAST, MODES

AGENTS_THEN_KEYS = Recipe(Phases(Agents(), Downsample()))
"""Agents in the early steps, downsampled keys later, on two levels."""
TODO = Recipe(Downsample())
"""Downsampled keys in every step."""
STEP_CACHING = Recipe(steps=FAST.steps)
"""Full attention in all steps, some of which are cached."""
AGENTS_CACHED = replace(FAST, attention=Phases(Agents(), FAST.attention))
"""Agents in the early cached steps, on shared residuals, and downsampled keys in the later ones."""
EACH_KIND = {
    **MODES,
    "residuals": Recipe(Downsample(), residual=ResidualSharing(), steps=StepCache(2)),
    "agents": Recipe(Agents()),
}
"""Those with cached steps, with residuals, with neither."""
