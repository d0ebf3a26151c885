"""A recipe as one chooses it: a mode and its settings; and the line of Python that does the same."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from agentsd import Recipe
from agentsd.recipe import MODES, changed_text

_ATTENTION = {
    "ratio": "ratio (tokens merged)",
    "k": "k (weight of + kV)",
    "scale": "scale (exponent)",
    "early_frac": "early_frac (early steps)",
}
STEPS = {
    "interval": "interval (of computed steps)",
    "late_interval": "late_interval (at the end)",
    "extrapolation_order": "extrapolation_order (0 keeps)",
}
LABELS = _ATTENTION | STEPS
"""Settings that may be chosen, and what they are called."""


def defaults_of(mode: str) -> dict[str, Any]:
    """Return the settings that a recipe has, of its attention and of its steps, and their values."""
    recipe = MODES[mode]
    parts: list[Any] = [recipe.attention, *recipe.operators, *filter(None, [recipe.steps])]
    found = {name: [getattr(part, name) for part in parts if hasattr(part, name)] for name in LABELS}
    return {name: values[0] for name, values in found.items() if values}


def recipe_from(mode: str, settings: Mapping[str, Any]) -> Recipe:
    """Return the recipe of that name with these settings; raises TypeError or ValueError for a bad one."""
    attention, steps = _changed(mode, settings)
    recipe = MODES[mode].with_settings(**attention)
    return replace(recipe, steps=replace(recipe.steps, **steps)) if recipe.steps and steps else recipe


def _changed(mode: str, settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What of the settings the recipe has, and with another value: of its attention, and of its steps."""
    own = {n: settings[n] for n, value in defaults_of(mode).items() if settings.get(n, value) != value}
    return {n: v for n, v in own.items() if n not in STEPS}, {n: v for n, v in own.items() if n in STEPS}


def python_of(mode: str, settings: Mapping[str, Any]) -> str:
    """Return the imports and the line that put that recipe on a pipeline called `pipe`."""
    attention, steps = _changed(mode, settings)
    if not steps:
        words = "".join(f", {name}={value!r}" for name, value in attention.items())
        return f'from agentsd import apply_agentsd\n\napply_agentsd(pipe, mode="{mode}"{words})\n'
    written = changed_text(recipe_from(mode, settings))
    names = sorted(set(re.findall(r"[A-Z]\w+(?=\()", written)))
    return f"from agentsd import {', '.join(names)}, apply_agentsd\n\napply_agentsd(pipe, recipe={written})\n"
