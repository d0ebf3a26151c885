"""The dynamic program over steps against all plans, run by what a patched pipeline does with them."""

import itertools
import random

import pytest

from agentsd import GuidanceCache, StepCache
from agentsd.cache.plan import plan_run
from agentsd.calibration.program import best_plans

PRICES = {"F": 10, "f": 2, "H": 5, "h": 1}
LEVELS = (999, 900, 850, 700, 400, 150, 20)


def realized(computed, guided, order):
    """What a run with these computed steps, and of them these guided ones, computes."""
    at_computed = tuple(level for level, is_computed in zip(LEVELS, computed, strict=True) if is_computed)
    at_guided = tuple(level for level, is_guided in zip(LEVELS, guided, strict=True) if is_guided)
    plan = plan_run(
        StepCache(extrapolation_order=order, computed_timesteps=at_computed),
        GuidanceCache(computed_timesteps=at_guided),
        LEVELS,
    )
    return "".join(kind.symbol for kind in plan.values())


def every_plan(order, conditional, max_age, max_kept):
    """The symbols of all plans within the limits, one by one."""
    count, found = len(LEVELS), {}
    for computed in itertools.product((True, False), repeat=count - 1):
        computed = (True, *computed)
        places = [i for i in range(count) if computed[i]]
        for picked in itertools.product((True, False), repeat=len(places) - 1):
            chosen = dict(zip(places, (True, *picked), strict=True))
            if all(picked) or conditional:
                symbols = realized(computed, [chosen.get(i, False) for i in range(count)], order)
                found[symbols] = None
    return [symbols for symbols in found if within(symbols, max_age, max_kept)]


def within(symbols, max_age, max_kept):
    if "H" in symbols and symbols[: symbols.index("H")].count("F") < 2:
        return False
    for i, symbol in enumerate(symbols):
        before = symbols[:i]
        if symbol in "fh" and i - max(before.rfind("F"), before.rfind("H")) > max_age:
            return False
        if symbol in "Hh" and i - max(before.rfind("F"), before.rfind("f")) > max_kept:
            return False
    return True


def price_of(i, symbol, computed, _=0):
    """One more for each cached step that a computed one is told of."""
    return PRICES[symbol] + (i - computed[-1] - 1 if symbol == "F" and computed else 0)


def figures_of(symbols, order, lost):
    """Cost and error, by looking back from each step."""
    cost, error = 0, 0.0
    for i, symbol in enumerate(symbols):
        computed = tuple(j for j in range(i) if symbols[j] in "FH")[-1 - order :]
        guided = max((j for j in range(i) if symbols[j] in "Ff"), default=-1)
        cost += price_of(i, symbol, computed)
        error += lost(i, symbol, computed, guided)
    return cost, error


@pytest.mark.parametrize("order", [0, 1])
@pytest.mark.parametrize("conditional", [False, True])
@pytest.mark.parametrize(("max_age", "max_kept"), [(3, 4), (1, 2), (9, 9)])
def test_no_plan_of_all_is_better_at_any_cost(order, conditional, max_age, max_kept):
    for seed in range(5):
        table = {}

        def lost(*key, table=table, rng=random.Random(seed)):  # noqa: B008  (a new one in each round)
            return table.setdefault(key, 0.0 if key[1] == "F" else rng.random())

        limits = {"order": order, "conditional": conditional, "max_age": max_age, "max_kept": max_kept}
        found = best_plans(
            len(LEVELS),
            price_of,
            lambda *key: lost(*key[:4]),
            phases={0: 1},
            **limits,
        )
        every = [
            figures_of(symbols, order, lost) for symbols in every_plan(order, conditional, max_age, max_kept)
        ]
        assert [plan.cost for plan in found] == sorted({plan.cost for plan in found}, reverse=True)
        for plan in found:
            assert figures_of(plan.symbols, order, lost) == pytest.approx((plan.cost, plan.error))
            assert within(plan.symbols, max_age, max_kept)
        for budget in range(min(cost for cost, _ in every), 71):
            best = min(error for cost, error in every if cost <= budget)
            assert min(plan.error for plan in found if plan.cost <= budget) == pytest.approx(best)


def test_the_dearest_step_is_left_out_first():
    found = best_plans(
        4,
        lambda i, symbol, computed, _: PRICES[symbol] * (3 if i == 2 else 1),
        lambda i, symbol, computed, guided, _: 1.0 * (symbol != "F"),
        phases={0: 1},
        order=0,
        conditional=False,
        max_age=4,
        max_kept=8,
    )
    assert [plan[:2] for plan in found] == [(60, 0.0), (36, 1.0), (28, 2.0), (20, 3.0)]
    assert (found[0].symbols, found[1].symbols, found[3].symbols) == ("FFFF", "FFfF", "Ffff")


@pytest.mark.parametrize(("phases", "order"), [({0: 3, 3: 2}, 1), ({0: 2}, 0), ({0: 1, 4: 3}, 0)])
def test_no_plan_with_any_choice_of_each_phase_is_better(phases, order):
    """A choice saves more of a computed step than of a cached one, and loses in every step of its phase."""
    for seed in range(3):
        rng, table = random.Random(seed), {}
        starts = sorted(phases)
        phase_of = [max(start for start in starts if start <= i) for i in range(len(LEVELS))]
        saved = {(start, c): (0, 0) if c == 0 else (rng.randrange(1, 5), rng.randrange(2))
                 for start in starts for c in range(phases[start])}  # fmt: skip
        added = {(i, c): 0.0 if c == 0 else 0.3 * rng.random() for i in range(len(LEVELS)) for c in range(3)}

        def price(i, symbol, computed, choice, saved=saved, phase_of=phase_of):
            return PRICES[symbol] - saved[phase_of[i], choice][symbol in "fh"]

        def lost(*key, table=table, rng=rng):
            return table.setdefault(key, 0.0 if key[1] == "F" else rng.random())

        def lost_with(i, symbol, computed, guided, choice, lost=lost, added=added):
            return lost(i, symbol, computed, guided) + added[i, choice]

        limits = {"order": order, "conditional": False, "max_age": 3, "max_kept": 4}
        found = best_plans(len(LEVELS), price, lost_with, phases=phases, **limits)
        every = {}
        for symbols in every_plan(order, False, 3, 4):
            for choices in itertools.product(*(range(phases[start]) for start in starts)):
                chosen = [dict(zip(starts, choices, strict=True))[phase] for phase in phase_of]
                _, error = figures_of(symbols, order, lost)
                cost = sum(price(i, symbol, (), chosen[i]) for i, symbol in enumerate(symbols))
                every[symbols, choices] = cost, error + sum(added[i, c] for i, c in enumerate(chosen))
        for plan in found:
            assert every[plan.symbols, plan.choices] == pytest.approx((plan.cost, plan.error))
        for budget in range(min(cost for cost, _ in every.values()), 71):
            best = min(error for cost, error in every.values() if cost <= budget)
            assert min(plan.error for plan in found if plan.cost <= budget) == pytest.approx(best)
