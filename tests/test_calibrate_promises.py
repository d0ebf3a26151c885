"""What a calibrated recipe promises, and where it serves, against runs under it."""

from __future__ import annotations

import pytest
from calibrating import STEPS, distance, run, work

from agentsd import Recipe, apply_agentsd


def test_the_goal_is_met_as_measured_by_patching(plain, calibrated, tmp_path):
    _, found, told = calibrated
    baseline = run(plain)[0]
    unpatched = work(plain)
    with apply_agentsd(plain, recipe=found) as handle:
        patched = run(plain)[0]
        calls = handle.summary().split()[0]
        speedup = unpatched / work(plain)
    figures = found.measured["found"]
    assert figures["speedup"] == pytest.approx(speedup)
    assert speedup >= 1.6
    assert figures["predicted_speedup"] == pytest.approx(speedup, rel=0.02)
    assert figures["distance"] == pytest.approx(distance(patched, baseline), rel=1e-3)
    assert found.measured["plan"] == calls
    assert found.measured["goal"] == {"speedup": 1.6}
    assert [done for done, _ in told[:-1]] == list(range(1, len(told)))
    assert told[-1] == (len(told) - 1, len(told) - 1)
    again = Recipe.load(found.save(tmp_path / "mine.yaml"))
    assert (again, again.measured) == (found, found.measured)


def test_promises_are_those_of_held_out_prompts(plain, calibrated):
    found = calibrated[1]
    promised = found.measured["promises"]
    baseline = run(plain, "a dog", 1)[0]
    reference = run(plain, "a dog", 1, num_inference_steps=20)[0]
    with apply_agentsd(plain, recipe=found):
        patched = run(plain, "a dog", 1)[0]
    assert promised["distance"] == pytest.approx(distance(patched, baseline), rel=1e-3)
    assert promised["reference_distance"] == pytest.approx(distance(patched, reference), rel=1e-3)
    assert promised["baseline_reference"] == pytest.approx(distance(baseline, reference), rel=1e-3)
    assert (promised["prompts"], promised["held_out"]) == (1, True)
    for row in promised["fewer_steps"]:
        fewer = run(plain, "a dog", 1, num_inference_steps=row["steps"])[0]
        assert row["timesteps"] == plain.scheduler.timesteps.tolist()
        assert row["distance"] == pytest.approx(distance(fewer, baseline), rel=1e-3)
        assert row["reference_distance"] == pytest.approx(distance(fewer, reference), rel=1e-3)
        assert row["speedup"] == pytest.approx(STEPS / row["steps"])
    made_on = found.measured["made_on"]
    assert {name: made_on[name] for name in ("steps", "sampler", "size", "prompts", "cost", "seed")} == {
        "steps": STEPS, "sampler": "DDIMScheduler", "size": [32, 32], "prompts": ["a cat"],
        "cost": "macs", "seed": 0,
    }  # fmt: skip
    assert set(made_on["versions"]) == {"agentsd", "torch", "diffusers"}


@pytest.mark.parametrize("steps", [12, 25, 50])
def test_a_plan_serves_another_number_of_steps(plain, calibrated, steps):
    """As many computed steps, each the nearest to a noise level of the plan's."""
    found = calibrated[1]
    with apply_agentsd(plain, recipe=found) as handle:
        run(plain, num_inference_steps=steps)
        calls = handle.summary().split()[0]
    levels = plain.scheduler.timesteps.tolist()
    assert (len(calls), calls[0]) == (steps, "F")
    wanted = {0} | {min(range(steps), key=lambda i: abs(levels[i] - level)) for level in found.steps.at}
    assert {i for i, symbol in enumerate(calls) if symbol in "FH"} == wanted
    assert len(set(calls) & set("Ff")) == 2


def test_a_plan_serves_another_size(plain, calibrated):
    with apply_agentsd(plain, recipe=calibrated[1]) as handle:
        run(plain, height=48, width=40)
        assert handle.summary().split()[0] == calibrated[1].measured["plan"]


def test_a_plan_stays_whole_in_few_steps(plain, calibrated):
    with apply_agentsd(plain, recipe=calibrated[1]) as handle:
        with pytest.warns(UserWarning, match="a run of 6 steps has none to spare"):
            run(plain, num_inference_steps=6)
        assert set(handle.summary().split()[0]) == {"F"}
