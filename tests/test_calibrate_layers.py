"""What each layer runs, against all combinations of small cases."""

from __future__ import annotations

import itertools
import random

import pytest
from calibrating import COUNTED, MERGE

from agentsd import Agents, Phases, calibrate
from agentsd.calibration import measured
from agentsd.calibration.attention import (
    OPERATORS,
    Effect,
    choices_of,
    layers_of,
)


def test_no_combination_of_layers_saves_as_much_for_less():
    rng = random.Random(0)
    for _ in range(20):
        effects = {
            f"layer {i}": {o: Effect(rng.random(), rng.uniform(-0.05, 0.2)) for o in OPERATORS}
            for i in range(4)
        }
        every = [
            [
                of[operator] if operator else Effect(0.0, 0.0)
                for of, operator in zip(effects.values(), does, strict=True)
            ]
            for does in itertools.product((None, *OPERATORS), repeat=4)
        ]
        sums = [(sum(e.loss for e in one), sum(e.saved for e in one)) for one in every]
        found = choices_of(effects, lambda name: name == "layer 0", 99)
        assert found[0].does == {}
        assert found[-1].computed == pytest.approx(max(saved for _, saved in sums))
        for choice in found:
            own = {name: effects[name][operator] for name, operator in choice.does.items()}
            assert choice.loss == pytest.approx(sum(effect.loss for effect in own.values()))
            assert choice.computed == pytest.approx(sum(effect.saved for effect in own.values()))
            assert choice.cached == pytest.approx(own.get("layer 0", Effect(0.0, 0.0)).saved)
            least = min(loss for loss, saved in sums if saved >= choice.computed - 1e-9)
            assert choice.loss == pytest.approx(least)
        few = choices_of(effects, lambda name: False, 3)
        assert len(few) <= 3
        assert (few[0].computed, few[-1].computed) == (0.0, pytest.approx(found[-1].computed))


def test_layers_are_written_by_phase():
    early, late = ({"a": MERGE, "b": MERGE}, {"b": MERGE, "c": Agents()})
    effects = [{name: {o: Effect(1.0, 0.1)} for name, o in of.items()} for of in (early, late)]
    chosen = [choices_of(of, lambda name: False, 9)[-1] for of in effects]
    found = layers_of(dict(zip((True, False), chosen, strict=True)), 0.3)
    assert found == {"a": Phases(MERGE, None, 0.3), "b": MERGE, "c": Phases(None, Agents(), 0.3)}


def test_layers_of_little_cost_stay_baseline(plain, figures, monkeypatch):
    monkeypatch.setattr(measured, "SMALL", 1.0)
    assert calibrate(plain, ["a cat"], speedup=1.3, resume=figures, **COUNTED).layers is None
