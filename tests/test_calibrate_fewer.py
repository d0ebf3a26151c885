"""Baseline in fewer steps, which a plan is judged beside."""

from __future__ import annotations

import functools
import itertools
import random
from types import SimpleNamespace

import pytest
from calibrating import MERGE, SETTINGS, distance, run
from diffusers import (
    EulerDiscreteScheduler,
)
from tiny import BETAS

from agentsd import Recipe, calibrate
from agentsd.calibration import search
from agentsd.calibration.fewer import at_cost, chosen_levels, promises
from agentsd.calibration.runs import Figures


@pytest.mark.parametrize(("steps", "expected"), [(2, 0.2), (2.5, 0.1), (3, 0.05), (1.2, 0.2)])
def test_fewer_steps_are_judged_at_the_plans_cost(steps, expected):
    """Half way between 2 steps at 0.2 and 3 at 0.05 is 0.1."""
    rows = [{"steps": 2, "distance": 0.2}, {"steps": 3, "distance": 0.05}]
    assert at_cost(rows, steps, "distance") == pytest.approx(expected)
    assert at_cost(rows[:1], steps, "distance") == pytest.approx(0.2)


@pytest.mark.parametrize(("reference", "beaten"), [(None, True), (0.2, False), (0.5, True)])
def test_fewer_steps_are_judged_by_converged_runs_where_there_are_any(reference, beaten):
    """Fewer steps end at 0.1 from the baseline and 0.4 from reference runs, the plan at 0.3 from the
    baseline."""

    class Known:
        def compare(self, recipe, numbers, num_inference_steps=None):
            if recipe is not None:
                return Figures(2.5, 0.3, reference, "F", [])
            known = None if reference is None else 0.4
            return Figures(10 / num_inference_steps, 0.1, known, "", [999.0])

        def baseline_reference(self):
            return 0.05

    class Pipe:
        def __call__(self, prompt):
            pass

    table = SimpleNamespace(levels=[999.0 - 100 * i for i in range(10)], skipped=lambda *args: 1.0)
    found = promises(Pipe(), Known(), table, Recipe(MERGE), range(3))
    assert found["beaten_by_fewer_steps"] is beaten
    assert [row["steps"] for row in found["fewer_steps"]] == [4]
    assert found.get("baseline_reference") == (None if reference is None else 0.05)


def test_noise_levels_are_chosen_where_the_sampler_takes_them(make_plain, monkeypatch):
    monkeypatch.setattr(search, "FRONTIER", 2)
    pipe = make_plain(scheduler=EulerDiscreteScheduler(**BETAS, steps_offset=1))
    settings = SETTINGS | {"operators": (), "guidance_scale": 1.0, "cost": "time"}
    found = calibrate(pipe, ["a cat"], max_distance=10.0, **settings)
    baseline = run(pipe, guidance_scale=1.0)[0]
    levels = pipe.scheduler.timesteps.tolist()
    rows = found.measured["promises"]["fewer_steps"]
    chosen = [row for row in rows if row.get("chosen")]
    assert [row["steps"] for row in chosen] == [row["steps"] for row in rows if not row.get("chosen")]
    for row in chosen:
        assert set(row["timesteps"]) <= set(levels)
        assert len(row["timesteps"]) == row["steps"]
        by_hand = run(pipe, timesteps=row["timesteps"], guidance_scale=1.0)[0]
        assert row["distance"] == pytest.approx(distance(by_hand, baseline), rel=1e-3)


def test_no_other_levels_lose_less():
    """Against all sets of levels of a table at random."""
    rng, count = random.Random(0), 7

    levels = [float(900 - 100 * step) for step in range(count)]
    table = SimpleNamespace(levels=levels, skipped=functools.cache(lambda step, computed: rng.random()))
    for order in (0, 1):
        found = chosen_levels(table, order)
        for steps, levels in found.items():
            totals = {}
            for made in itertools.combinations(range(1, count), steps - 1):
                made = (0, *made)
                if max(b - a for a, b in itertools.pairwise((*made, count))) > 5:
                    continue
                totals[made] = sum(
                    table.skipped(i, tuple(j for j in made if j < i)[-1 - order :])
                    for i in range(count)
                    if i not in made
                )
            place = tuple(table.levels.index(level) for level in levels)
            assert totals[place] == pytest.approx(min(totals.values()))
