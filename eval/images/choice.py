"""A recipe as one chooses it: a mode and its settings; and the line of Python that does the same."""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from agentsd import Recipe, StepCache
from agentsd.recipe import MODES

from ..settings import recipe_of

ATTENTION = {
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
LABELS = ATTENTION | STEPS
"""Settings that may be chosen, and what they are called."""


def defaults_of(mode: str) -> dict[str, Any]:
    """Return the settings that a recipe has, of its attention and of its steps, and their values."""
    recipe = MODES[mode]
    parts: list[Any] = [recipe.attention, *recipe.operators, *filter(None, [recipe.steps])]
    found = {name: [getattr(part, name) for part in parts if hasattr(part, name)] for name in LABELS}
    return {name: values[0] for name, values in found.items() if values}


def changed(mode: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return what of the settings the recipe has, and with another value."""
    return {
        name: settings[name]
        for name, value in defaults_of(mode).items()
        if name in settings and settings[name] != value
    }


def recipe_from(mode: str, settings: Mapping[str, Any]) -> Recipe:
    """Return the recipe of that name with these settings; raises TypeError or ValueError for a bad one."""
    own = changed(mode, settings)
    recipe = recipe_of({"mode": mode} | {name: own[name] for name in own if name in ATTENTION})
    steps = {name: own[name] for name in own if name in STEPS}
    return replace(recipe, steps=replace(recipe.steps, **steps)) if recipe.steps and steps else recipe


def python_of(mode: str, settings: Mapping[str, Any]) -> str:
    """Return the imports and the lines that put that recipe on a pipeline called `pipe`."""
    own = changed(mode, settings)
    words = _words({name: value for name, value in own.items() if name in ATTENTION})
    if not set(own) & set(STEPS):
        how = f'mode="{mode}"' + (f", {words}" if words else "")
        return f"from agentsd import apply_agentsd\n\napply_agentsd(pipe, {how})\n"
    recipe = recipe_from(mode, settings)
    values = {field: getattr(recipe.steps, field.name) for field in fields(StepCache)}
    steps = f"StepCache({_words({f.name: value for f, value in values.items() if value != f.default})})"
    if recipe.attention is None:
        return (
            f"from agentsd import Recipe, StepCache, apply_agentsd\n\n"
            f"apply_agentsd(pipe, recipe=Recipe(steps={steps}))\n"
        )
    base = f'MODES["{mode}"]' + (f".with_settings({words})" if words else "")
    return (
        "from dataclasses import replace\n\n"
        "from agentsd import StepCache, apply_agentsd\nfrom agentsd.recipe import MODES\n\n"
        f"steps = {steps}\napply_agentsd(pipe, recipe=replace({base}, steps=steps))\n"
    )


def _words(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in settings.items())
