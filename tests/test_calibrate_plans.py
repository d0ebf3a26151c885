"""Regular plans, which stand beside those of least predicted loss."""

from __future__ import annotations

import pytest
from calibrating import MERGE

from agentsd import Recipe, ReuseSteps
from agentsd.calibration.attention import Choice
from agentsd.calibration.measured import Measured
from agentsd.calibration.plans import INTERVALS, Found, plans_of
from agentsd.calibration.program import Plan
from agentsd.calibration.runs import Figures
from agentsd.calibration.search import _of_speedup
from agentsd.recipe import REUSE


class Lost:
    """A tenth for each cheap call, by how far it is from the last full one."""

    def of(self, step, symbol, fulls, whole):
        return 0.0 if symbol == "F" else 0.1 * (step - fulls[0])


@pytest.fixture
def measured():
    """Of a run of 25 steps whose cheap calls cost a tenth."""
    measured = Measured.__new__(Measured)
    measured.levels = [float(level) for level in range(999, -1, -40)]
    measured.early = [step < 10 for step in range(25)]
    measured.choices = {True: [Choice()], False: [Choice()]}
    measured.guided, measured.corrects = False, True
    measured._losses, measured._prices = Lost(), {"F": 100.0, "f": 10.0}
    measured._weights, measured._counts = [1.0] * 25, dict.fromkeys(range(25), 1)
    measured._count, measured._power = 1, 1.0
    return measured


@pytest.mark.parametrize("corrects", [True, False])
def test_the_named_recipes_schedule_is_among_them(measured, corrects):
    measured.corrects = corrects
    regular = [one for kind in plans_of(measured, 0.4) for one in kind if one.regular]
    assert len(regular) == 23 * len(INTERVALS)
    symbols = ["F" if full else "f" for full in REUSE.steps.full(measured.levels)]
    own = next(one for one in regular if one.plan.symbols == "".join(symbols))
    again = sum("F" in symbols[step:] for step in range(25) if symbols[step] == "f")
    assert own.plan.cost == 100 * symbols.count("F") + 10 * symbols.count("f") + 10 * again * corrects
    at = tuple(level for level, symbol in zip(measured.levels, symbols, strict=True) if symbol == "F")
    assert own.recipe == Recipe(steps=ReuseSteps(at=at, corrected=corrects))
    assert own.recipe.steps.full(measured.levels) == [symbol == "F" for symbol in symbols]


def test_each_kind_has_the_dearest_first_and_none_that_saves_nothing(measured):
    for kind in plans_of(measured, 0.4):
        costs = [one.plan.cost for one in kind]
        assert costs == sorted(costs, reverse=True)
        assert all("f" in one.plan.symbols for one in kind)


def test_a_regular_plan_is_run_though_others_are_predicted_to_be_nearer():
    recipes = [Recipe(MERGE, seed=seed) for seed in range(5)]
    figures = {recipe: Figures(1.6, 0.5, None, "Ff", []) for recipe in recipes}
    figures[recipes[4]] = Figures(1.6, 0.1, None, "Ff", [])
    others = [[Found(Plan(60, 0.0, "Ff", ()), recipe, 0.01)] for recipe in recipes[:4]]
    regular = [Found(Plan(60, 1.0, "Ff", ()), recipes[4], 1.0, regular=True)]

    class Known:
        def compare(self, recipe, numbers):
            return figures[recipe]

    assert _of_speedup([*others, regular], 100, 1.5, Known(), range(2)) == regular[0]
