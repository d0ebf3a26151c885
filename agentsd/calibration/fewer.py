"""What a plan is to beat: baseline in fewer steps, at the sampler's noise levels and at chosen ones."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

from ..recipe import Recipe
from .measured import MAX_AGE, MAX_KEPT, Measured
from .program import best_plans
from .runs import Figures, Runs


def chosen_levels(measured: Measured, order: int) -> dict[int, list[float]]:
    """For numbers of steps, those of the run's noise levels that lose least, as if losses added up.

    A skipped step is a call that costs nothing: the sampler goes on with the prediction of the last steps
    made, kept (order 0) or extrapolated over the noise level (order 1).
    """
    plans = best_plans(
        len(measured.levels),
        lambda step, symbol, computed, _: int(symbol == "F"),
        lambda step, symbol, computed, guided, _: 0.0 if symbol == "F" else measured.skipped(step, computed),
        phases={0: 1},
        order=order,
        conditional=False,
        max_age=MAX_AGE,
        max_kept=MAX_KEPT,
    )
    return {
        plan.cost: [
            level for level, symbol in zip(measured.levels, plan.symbols, strict=True) if symbol == "F"
        ]
        for plan in plans
    }


def takes_levels(pipe: Any, levels: Sequence[float]) -> bool:
    """Whether a pipeline with its sampler, as it is set, runs on noise levels that it is given."""
    if "timesteps" not in inspect.signature(type(pipe).__call__).parameters:
        return False
    scheduler = deepcopy(pipe.scheduler)
    try:
        scheduler.set_timesteps(timesteps=list(levels))
    except (TypeError, ValueError, NotImplementedError):
        return False
    return len(scheduler.timesteps) == len(levels)


def rivals(
    pipe: Any, runs: Runs, measured: Measured, numbers: Sequence[int], exact: float
) -> list[list[dict[str, Any]]]:
    """Figures of the baseline in the two numbers of steps around `exact`, a list for each way to space
    them."""
    counts = sorted({max(2, math.floor(exact)), max(2, math.ceil(exact))})
    spaced = [_row(runs, numbers, count, num_inference_steps=count) for count in counts]
    by_order = [chosen_levels(measured, order) for order in (0, 1)]
    chosen = []
    for count in counts:
        tried = [levels[count] for levels in by_order if count in levels]
        tried = [levels for levels in tried if takes_levels(pipe, levels)]
        if tried:
            nearest = min(tried, key=lambda levels: runs.compare(None, (0,), timesteps=levels).distance)
            chosen.append(_row(runs, numbers, count, timesteps=nearest) | {"chosen": True})
    return [spaced, chosen] if len(chosen) == len(counts) else [spaced]


def _row(runs: Runs, numbers: Sequence[int], count: int, **changes: Any) -> dict[str, Any]:
    figures = runs.compare(None, numbers, **changes)
    levels = [int(level) if level == int(level) else level for level in figures.levels]
    return {"steps": count, **_distances(figures), "timesteps": levels}


def _distances(figures: Figures) -> dict[str, Any]:
    reference = {} if figures.reference is None else {"reference_distance": figures.reference}
    return {"speedup": figures.speedup, "distance": figures.distance, **reference}


def at_cost(rows: Sequence[dict[str, Any]], exact: float, name: str) -> float:
    """A distance of a number of steps between two that were run: on the line of its logarithm."""
    fewer, more = rows[0], rows[-1]
    share = (exact - fewer["steps"]) / max(1, more["steps"] - fewer["steps"])
    share = min(max(share, 0.0), 1.0)
    return float(fewer[name] ** (1 - share) * more[name] ** share)


def promises(
    pipe: Any, runs: Runs, measured: Measured, recipe: Recipe, numbers: Sequence[int]
) -> dict[str, Any]:
    """The figures of a recipe and of its rivals, and whether one of them ends as near at its cost.

    That goes by the distance to reference runs, where there are any: in fewer steps a run strays from those
    and from baseline's in the same direction, so that its distance to the baseline's own latents flatters it.
    """
    figures = runs.compare(recipe, numbers)
    exact = len(measured.levels) / figures.speedup
    families = rivals(pipe, runs, measured, numbers, exact)
    found = {"prompts": len(numbers), **_distances(figures)}
    name = "distance" if figures.reference is None else "reference_distance"
    if figures.reference is not None:
        found["baseline_reference"] = runs.baseline_reference()
    return found | {
        "fewer_steps": [row for rows in families for row in rows],
        "beaten_by_fewer_steps": min(at_cost(rows, exact, name) for rows in families) <= found[name],
    }
