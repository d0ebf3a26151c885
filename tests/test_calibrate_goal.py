"""The plan that meets a goal, however the figures lie."""

from __future__ import annotations

import random
import time
from contextlib import suppress

import pytest
from calibrating import COUNTED, MERGE, SETTINGS, STEPS, distance, run
from tiny import snapshot

from agentsd import Recipe, apply_agentsd, calibrate
from agentsd.calibration.plans import Found
from agentsd.calibration.program import Plan
from agentsd.calibration.runs import Figures
from agentsd.calibration.search import _of_distance, _of_speedup


def test_another_goal_takes_the_same_figures(plain, figures):
    before, runs = snapshot(plain.unet), []
    plain.scheduler.register_to_config(_use_default_values=["beta_end"])  # in each process in another order
    hook = plain.unet.conv_in.register_forward_hook(lambda *args: runs.append(1))
    found = calibrate(plain, ["a cat"], max_distance=0.02, resume=figures, **COUNTED)
    hook.remove()
    assert snapshot(plain.unet) == before
    with apply_agentsd(plain, recipe=found):
        patched = run(plain)[0]
    assert found.measured["found"]["distance"] == pytest.approx(distance(patched, run(plain)[0]), rel=1e-3)
    assert found.measured["found"]["distance"] <= 0.02
    assert found.measured["found"]["speedup"] > 1.6
    assert len(runs) < 20 * STEPS  # no table is measured again


def test_what_is_found_for_a_speedup_meets_it_however_the_figures_lie():
    rng, seen = random.Random(2), []

    class Known:
        def compare(self, recipe, numbers):
            return figures[recipe]

    for _ in range(200):
        recipes = [Recipe(MERGE, seed=seed) for seed in range(rng.randrange(1, 20))]
        figures = {r: Figures(rng.uniform(1.2, 2), rng.random(), None, "Ff", []) for r in recipes}
        plans = [
            Found(Plan(100 - 3 * i, 0.1 * i, "Ff", ()), recipe, 0.1 * i) for i, recipe in enumerate(recipes)
        ]
        with suppress(ValueError):
            found = _of_speedup([plans[::2] or plans, plans[1::2] or plans], 100, 1.5, Known(), range(2))
            assert figures[found.recipe].speedup >= 1.5
            seen.append(found)
    assert len(seen) > 50
    figures = dict.fromkeys(recipes, Figures(1.4, 0.7, None, "Ff", []))
    plans = [Found(Plan(60, 0.1, "Ff", ()), recipes[0], 0.1)]
    with pytest.raises(ValueError, match=r"speedup=1\.5 was predicted, .* had 1\.40 at most"):
        _of_speedup([plans], 100, 1.5, Known(), range(2))
    with pytest.raises(ValueError, match=r"speedup=3 cannot be met .*: the greatest is about 1\.67"):
        _of_speedup([plans], 100, 3, Known(), range(2))


def test_what_is_found_for_a_distance_meets_it_however_the_figures_lie():
    rng = random.Random(1)

    class Known:
        def compare(self, recipe, numbers):
            return figures[recipe]

    for _ in range(200):
        recipes = [Recipe(MERGE, seed=seed) for seed in range(rng.randrange(1, 20))]
        figures = {recipe: Figures(rng.uniform(1.1, 2), rng.random(), None, "Ff", []) for recipe in recipes}
        plans = [
            Found(Plan(100 - 3 * i, 0.1 * i, "Ff", ()), recipe, 0.1 * i) for i, recipe in enumerate(recipes)
        ]
        with suppress(ValueError):
            found = _of_distance([plans[::2], plans[1::2]], 0.5, Known(), range(2))
            assert figures[found.recipe].distance <= 0.5
    figures = dict.fromkeys(recipes, Figures(1.5, 0.7, None, "Ff", []))
    with pytest.raises(ValueError, match=r"max_distance=0\.5 cannot be met .*: the least seen is 0\.7"):
        _of_distance([plans], 0.5, Known(), range(2))


def test_time_may_be_the_cost(plain, monkeypatch):
    """By a clock that shows 2 s for the last layer of a pass, 14 s for a deep one, and a query's 10 ms."""
    shown = 0.0

    def pass_by(seconds):
        nonlocal shown
        shown += seconds

    monkeypatch.setattr(time, "process_time", lambda: shown)
    plain.unet.conv_out.register_forward_hook(lambda m, args, out: pass_by(2 * len(args[0])))
    plain.unet.down_blocks[1].resnets[0].register_forward_hook(
        lambda m, args, out: pass_by(14 * len(args[0]))
    )
    found = calibrate(plain, ["a cat"], speedup=2.0, cost="time", operators=(), **SETTINGS)
    plan = found.measured["plan"]
    again = plan.rstrip("f").count("f") if found.steps.corrected else 0
    seconds = sum({"F": 32, "f": 4, "H": 16, "h": 2}[symbol] for symbol in plan) + 4 * again
    assert found.measured["made_on"]["cost"] == "time"
    assert found.measured["found"]["speedup"] == pytest.approx(32 * STEPS / seconds)
    assert found.measured["found"]["predicted_speedup"] == pytest.approx(32 * STEPS / seconds, rel=0.01)
