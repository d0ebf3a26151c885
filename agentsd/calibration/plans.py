"""The plans of a run that are worth running, by what their calls were measured to lose and cost."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from ..recipe import Recipe
from ..reuse import ReuseGuidance, ReuseSteps
from .attention import Choice, layers_of
from .measured import MAX_AGE, MAX_KEPT, Measured
from .program import Plan, best_plans

CHEAP = (ReuseSteps(order=0, corrected=False), ReuseSteps(order=1, corrected=False), ReuseSteps())
"""Kinds of cheap calls."""
INTERVALS = ((2, 2), (2, 3), (3, 3), (3, 4), (4, 5))
"""`every` and `late_every` of the regular plans."""


class Found(NamedTuple):
    """A plan, its recipe, and the distance that is predicted of it.

    Attributes:
        regular: its full calls come in equal intervals.
    """

    plan: Plan
    recipe: Recipe
    distance: float
    regular: bool = False

    @property
    def group(self) -> tuple[bool, bool]:
        """Whether it is regular, and whether it changes attention: each group has plans that are run."""
        return self.regular, self.recipe.layers is not None


GROUPS = ((False, False), (False, True), (True, False))
"""That each have plans to be run."""


def plans_of(measured: Measured, early_frac: float) -> list[list[Found]]:
    """The frontier of each kind of plan: with attention or not, by its cheap calls, half calls or not.

    And regular plans, a list for each pair of intervals.
    """
    kinds = []
    for attends in (False, True) if any(len(c) > 1 for c in measured.choices.values()) else (False,):
        for steps in CHEAP if measured.corrects else CHEAP[:2]:
            for halves in (False, True) if measured.guided and not steps.corrected else (False,):
                plans = _frontier(measured, attends, steps, halves)
                kinds.append([_found(plan, steps, measured, early_frac) for plan in plans if _saves(plan)])
    steps = CHEAP[-1] if measured.corrects else CHEAP[1]
    for every, late in INTERVALS:
        plans = _regular(measured, steps, every, late)
        kinds.append([_found(plan, steps, measured, early_frac)._replace(regular=True) for plan in plans])
    return kinds


def _regular(measured: Measured, kind: ReuseSteps, every: int, late: int) -> list[Plan]:
    """Plans as the named recipe has them, by how many first steps are full; the dearest first.

    Losses that add up favour plans with all cheap calls where each alone does no harm. In a run they add to
    each other, and a regular plan may then be the nearer one.
    """
    cost_of, error_of = _figures_of(measured, kind)
    plans = []
    for first in range(len(measured.levels) - 2, 0, -1):
        full = replace(kind, every=every, first=first, late_every=late).full(measured.levels)
        symbols = "".join("F" if is_full else "f" for is_full in full)
        cost, error = 0, 0.0
        fulls: tuple[int, ...] = ()
        for step, symbol in enumerate(symbols):
            cost += cost_of(step, symbol, fulls, Choice())
            error += error_of(step, symbol, fulls, step - 1, Choice())
            fulls = (*fulls, step)[-1 - kind.order :] if symbol == "F" else fulls
        plans.append(Plan(cost, error, symbols, (0,) * len(measured.choices)))
    return sorted(plans, key=lambda plan: (-plan.cost, plan.error))


def _figures_of(measured: Measured, steps: ReuseSteps) -> tuple[Callable[..., int], Callable[..., float]]:
    """What a call costs and loses, by its kind of cheap calls."""
    if steps.corrected:
        return measured.cost_corrected, measured.error_corrected
    return measured.cost, measured.error


def _saves(plan: Plan) -> bool:
    return set(plan.symbols) != {"F"} or any(plan.choices)


def _frontier(measured: Measured, attends: bool, steps: ReuseSteps, halves: bool) -> list[Plan]:
    choices = measured.choices if attends else {phase: [Choice()] for phase in measured.choices}
    phases = {measured.early.index(phase): len(choices[phase]) for phase in choices}

    @cache
    def cost(step: int, symbol: str, fulls: tuple[int, ...], choice: int) -> int:
        return cost_of(step, symbol, fulls, choices[measured.early[step]][choice])

    def error(step: int, symbol: str, fulls: tuple[int, ...], whole: int, choice: int) -> float:
        return error_of(step, symbol, fulls, whole, choices[measured.early[step]][choice])

    cost_of, error_of = _figures_of(measured, steps)

    return best_plans(
        len(measured.levels),
        cost,
        error,
        phases=phases,
        order=steps.order,
        halves=halves,
        max_age=MAX_AGE,
        max_kept=MAX_KEPT,
    )


def _found(plan: Plan, kind: ReuseSteps, measured: Measured, early_frac: float) -> Found:
    named = [int(level) if level == int(level) else level for level in measured.levels]
    full = tuple(level for level, symbol in zip(named, plan.symbols, strict=True) if symbol in "FH")
    whole = tuple(level for level, symbol in zip(named, plan.symbols, strict=True) if symbol == "F")
    steps = replace(kind, at=full) if set(plan.symbols) & set("fh") else None
    guidance = ReuseGuidance(at=whole) if set(plan.symbols) & set("Hh") else None
    phases = sorted(measured.choices, key=measured.early.index)
    chosen = {
        phase: measured.choices[phase][choice] for phase, choice in zip(phases, plan.choices, strict=True)
    }
    layers = layers_of(chosen, early_frac) or None
    return Found(plan, Recipe(layers=layers, steps=steps, guidance=guidance), math.sqrt(plan.error))
