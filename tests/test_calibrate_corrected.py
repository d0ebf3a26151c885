"""Plans whose cached steps are corrected by the computed step after them."""

from __future__ import annotations

import pytest
import torch
from calibrating import SETTINGS, STEPS, distance, run, work

from agentsd import StepCache, apply_agentsd, calibrate
from agentsd.cache.skipped import SkippedLayers
from agentsd.calibration import plans
from agentsd.calibration.attention import Choice
from agentsd.calibration.losses import Losses, mean_square
from agentsd.calibration.measured import Measured
from agentsd.calibration.recording import Call, cached_step, record
from agentsd.hosts.schedulers import training_sigma as sigma


@pytest.fixture
def only_corrected(monkeypatch):
    """Calibration that has no other cached steps."""
    monkeypatch.setattr(plans, "CHEAP", (StepCache(),))


def test_a_corrected_step_loses_what_the_line_between_its_computed_ones_misses(plain):
    """Nothing where the states are on a line but what cached steps of the true state lose."""
    skipped = SkippedLayers(plain.unet, 1)
    tap = skipped.hook()
    calls, _ = record(plain, plain.unet, skipped, 0.4, lambda: run(plain)[0])
    base, slope = calls[0].hidden, torch.randn_like(calls[0].hidden) / 1000
    lined = [Call(c.step, c.level, c.given, c.output, base + sigma(c.level) * slope, c.early) for c in calls]
    losses = Losses(None, 3, 5)
    for place in (2, 4):
        losses.add(losses.measure(lined, place, plain.unet, skipped))
    for call, computed in ((lined[2], (1, 3)), (lined[2], (0, 3)), (lined[4], (2, 5)), (lined[4], (1, 5))):
        exact = cached_step(plain.unet, skipped, call.given, call.hidden) - call.sample
        assert losses.of(call.step, "b", computed, -1) == pytest.approx(mean_square(exact), rel=1e-3)
    bent = Losses(None, 3, 5)
    bent.add(bent.measure(calls, 2, plain.unet, skipped))
    share = (sigma(calls[2].level) - sigma(calls[1].level)) / (sigma(calls[4].level) - sigma(calls[1].level))
    hidden = torch.lerp(calls[1].hidden, calls[4].hidden, share)
    missed = cached_step(plain.unet, skipped, calls[2].given, hidden) - calls[2].sample
    tap.remove()
    assert bent.of(2, "b", (1, 4), -1) == pytest.approx(mean_square(missed), rel=1e-3)
    assert bent.of(2, "b", (1, 4), -1) > bent.of(2, "b", (1, 3), -1) > 0


@pytest.mark.parametrize(("count", "step"), [(6, 1), (6, 4), (12, 5), (3, 2)])
def test_every_pair_of_computed_steps_around_a_run_of_cached_ones_is_measured(count, step):
    losses = Losses(None, 3, 5)
    around = {
        (last, after)
        for last in range(count)
        for after in range(last + 1, count)
        if last < step < after and after - last - 1 <= losses.max_age
    }
    assert set(losses.around(step, count)) >= {pair for pair in around if step - pair[0] <= losses.max_age}
    assert all(last < step < after < count for last, after in losses.around(step, count))


class Told:
    """Losses that say what they were asked for."""

    def of(self, step, symbol, computed, guided):
        return 0.0 if symbol == "F" else {"b": 100.0, "f": 1.0}[symbol] * (step + 1) + sum(computed)


def of_eight_steps():
    measured = Measured.__new__(Measured)
    measured.levels, measured._losses = list(range(8)), Told()
    measured._weights, measured._counts = [2.0] * 8, dict.fromkeys(range(8), 1)
    measured._count, measured._power = 1, 4.0
    return measured


def test_the_error_of_a_plan_is_that_of_its_corrected_calls():
    """Told with the computed step that corrects them; what none follows loses as it does uncorrected."""
    measured = of_eight_steps()
    plan, computed, error = "FFffFFff", (), 0.0
    for step, symbol in enumerate(plan):
        error += measured.error_corrected(step, symbol, computed[-2:], -1, Choice())
        computed += (step,) if symbol == "F" else ()
    corrected = (
        2.0 / 4.0 * ((100 * 3 + 1 + 4) ** 0.5 + (100 * 4 + 1 + 4) ** 0.5) ** 2
    )  # 2, 3, between 1 and 4
    ending = 2.0 / 4.0 * ((7 + 4 + 5) ** 0.5 + (8 + 4 + 5) ** 0.5) ** 2  # 6 and 7, from 4 and 5
    assert error == pytest.approx(corrected + ending)


def test_errors_of_cached_steps_after_the_same_computed_one_add_up_before_they_are_squared():
    measured = of_eight_steps()
    plan, computed, error = "FFffFfff", (), 0.0
    for step, symbol in enumerate(plan):
        error += measured.error(step, symbol, computed[-2:], step - 1, Choice())
        computed += (step,) if symbol == "F" else ()
    first = (3 + 0 + 1) ** 0.5 + (4 + 0 + 1) ** 0.5  # 2 and 3, from 0 and 1
    second = (6 + 1 + 4) ** 0.5 + (7 + 1 + 4) ** 0.5 + (8 + 1 + 4) ** 0.5  # 5 to 7, from 1 and 4
    assert error == pytest.approx(2.0 / 4.0 * (first**2 + second**2))


def test_what_is_promised_of_a_corrected_plan_is_what_its_run_does(plain, only_corrected):
    settings = {"operators": (), "cost": "macs", **SETTINGS}
    found = calibrate(plain, ["a cat"], speedup=1.4, **settings)
    seen = found.measured["found"]
    assert found.steps.corrected
    assert found.guidance is None
    assert set(found.measured["plan"]) == {"F", "f"}
    baseline, total = run(plain)[0], work(plain)
    with apply_agentsd(plain, recipe=found) as handle:
        patched, done = run(plain)[0], work(plain)
        assert handle.summary().split()[0] == found.measured["plan"]
    assert seen["distance"] == pytest.approx(distance(patched, baseline), rel=1e-3)
    assert seen["speedup"] == pytest.approx(total / done, rel=1e-6)
    assert seen["speedup"] >= 1.4
    assert seen["predicted_speedup"] == pytest.approx(seen["speedup"], rel=0.01)


def test_nothing_is_planned_with_a_correction_that_a_sampler_does_not_have(make_plain, pipe):
    plms = make_plain(scheduler=pipe.scheduler)
    settings = {"operators": (), "cost": "macs", **SETTINGS}
    found = calibrate(plms, ["a cat"], speedup=1.4, **settings)
    assert not found.steps.corrected
    with apply_agentsd(plms, recipe=found) as handle:
        run(plms)
        assert "corrected" not in handle.summary()
    assert len(found.measured["plan"]) == STEPS
