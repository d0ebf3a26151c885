"""The plans of a run that are worth running, by what their calls were measured to lose and cost."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from ..cache import GuidanceCache, StepCache
from ..recipe import Recipe
from .attention import Choice, layers_of
from .measured import MAX_AGE, MAX_KEPT, Measured
from .program import Plan, best_plans

CACHED = (StepCache(correct=False), StepCache())
"""Kinds of cached steps; the last where a run's sampler can be corrected."""


class Found(NamedTuple):
    """A plan, its recipe, and the distance that is predicted of it."""

    plan: Plan
    recipe: Recipe
    distance: float

    @property
    def attends(self) -> bool:
        """Whether it changes attention."""
        return self.recipe.layers is not None


def plans_of(measured: Measured, early_frac: float) -> list[list[Found]]:
    """The frontier of each kind of plan: with attention or not, by its cached and conditional-only steps."""
    kinds = []
    for attends in (False, True) if any(len(c) > 1 for c in measured.choices.values()) else (False,):
        for steps in CACHED if measured.corrects else CACHED[:1]:
            for conditional in (False, True) if measured.guided and not steps.correct else (False,):
                plans = _frontier(measured, attends, steps, conditional)
                kinds.append([_found(plan, steps, measured, early_frac) for plan in plans if _saves(plan)])
    return kinds


def _saves(plan: Plan) -> bool:
    return set(plan.symbols) != {"F"} or any(plan.choices)


def _frontier(measured: Measured, attends: bool, steps: StepCache, conditional: bool) -> list[Plan]:
    choices = measured.choices if attends else {phase: [Choice()] for phase in measured.choices}
    phases = {measured.early.index(phase): len(choices[phase]) for phase in choices}

    @cache
    def cost(step: int, symbol: str, computed: tuple[int, ...], choice: int) -> int:
        return cost_of(step, symbol, computed, choices[measured.early[step]][choice])

    def error(step: int, symbol: str, computed: tuple[int, ...], guided: int, choice: int) -> float:
        return error_of(step, symbol, computed, guided, choices[measured.early[step]][choice])

    if steps.correct:
        cost_of, error_of = measured.cost_corrected, measured.error_corrected
    else:
        cost_of, error_of = measured.cost, measured.error
    return best_plans(
        len(measured.levels),
        cost,
        error,
        phases=phases,
        order=steps.extrapolation_order,
        conditional=conditional,
        max_age=MAX_AGE,
        max_kept=MAX_KEPT,
    )


def _found(plan: Plan, kind: StepCache, measured: Measured, early_frac: float) -> Found:
    named = [int(level) if level == int(level) else level for level in measured.levels]
    computed = tuple(level for level, symbol in zip(named, plan.symbols, strict=True) if symbol in "FH")
    guided = tuple(level for level, symbol in zip(named, plan.symbols, strict=True) if symbol == "F")
    steps = replace(kind, computed_timesteps=computed) if set(plan.symbols) & set("fh") else None
    guidance = GuidanceCache(computed_timesteps=guided) if set(plan.symbols) & set("Hh") else None
    phases = sorted(measured.choices, key=measured.early.index)
    chosen = {
        phase: measured.choices[phase][choice] for phase, choice in zip(phases, plan.choices, strict=True)
    }
    layers = layers_of(chosen, early_frac) or None
    return Found(plan, Recipe(layers=layers, steps=steps, guidance=guidance), math.sqrt(plan.error))
