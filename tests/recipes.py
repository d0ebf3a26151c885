"""Recipes that change attention in every step, and leave no layer and no pass out."""

from __future__ import annotations

from agentsd import Agents, Downsample, Phases, Recipe

AGENTS_THEN_KEYS = Recipe(Phases(Agents(), Downsample()))
"""Agents in the early steps, downsampled keys later, on two levels."""
TODO = Recipe(Downsample())
"""Downsampled keys in every step."""
