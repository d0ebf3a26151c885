"""Calibration of whole calls against single runs under a patch, made here."""

from __future__ import annotations

import copy
import time

import pytest
import torch
from diffusers import DDIMScheduler, HeunDiscreteScheduler, LCMScheduler
from tiny import BETAS, make_unet, snapshot

from agentsd import Recipe, ReuseGuidance, ReuseSteps, apply_agentsd
from agentsd.calibration import calibrate_calls
from agentsd.calibration.calls import _fewer_steps
from agentsd.calibration.losses import Losses
from agentsd.calibration.recording import Call, cheap_call, record
from agentsd.calibration.runs import Figures, _between
from agentsd.reuse.left_out import LeftOut

STEPS = 8
SETTINGS = {"num_inference_steps": STEPS, "guidance_scale": 7.5}


@pytest.fixture
def plain(make_pipeline):
    """A pipeline with one U-Net call in each step."""
    return make_pipeline(scheduler=DDIMScheduler(**BETAS, clip_sample=False, steps_offset=1))


def run(pipe, seed=0, **changes):
    """The final latents and what the U-Net gave in each call."""
    outputs = []
    hook = pipe.unet.register_forward_hook(lambda m, args, out: outputs.append(out[0].clone()))
    rng = torch.Generator().manual_seed(seed)
    latents = pipe("a cat", generator=rng, output_type="latent", **SETTINGS | changes).images
    hook.remove()
    return latents, outputs


def measured_losses(pipe, scale):
    """The recorded calls, their losses, and what measures more."""
    left_out = LeftOut(pipe.unet, 1)
    tap = left_out.hook()
    calls, _ = record(pipe, pipe.unet, left_out, lambda: run(pipe)[0])
    losses = Losses(scale, 3, 5)
    ticks = []
    losses.add(calls, pipe.unet, left_out, lambda: ticks.append(1))
    assert len(ticks) == len(calls)
    return calls, losses, left_out, tap


def guided(output, scale):
    without, with_prompt = output.double().chunk(2)
    return without + scale * (with_prompt - without)


def test_losses_are_those_of_a_run_with_one_such_call(plain):
    """The last step is the only one left out, so that all before it is stock's."""
    before = snapshot(plain.unet)
    calls, losses, _, tap = measured_losses(plain, 7.5)
    tap.remove()
    assert snapshot(plain.unet) == before
    stock = guided(run(plain)[1][-1], 7.5)
    levels = tuple(call.level for call in calls)
    assert len(levels) == STEPS
    last = STEPS - 1
    for order in (0, 1):
        with apply_agentsd(plain, recipe=Recipe(steps=ReuseSteps(order=order, at=levels[:-1]))) as handle:
            cheap = guided(run(plain)[1][-1], 7.5)
            assert handle.summary().split()[0] == "F" * last + "f"
        fulls = tuple(range(last))[-1 - order :]
        expected = float((cheap - stock).square().mean())
        assert expected > 0
        assert losses.of(last, "f", fulls, last - 1) == pytest.approx(expected, rel=1e-3)
    with apply_agentsd(plain, recipe=Recipe(guidance=ReuseGuidance(at=levels[:-1]))) as handle:
        half = guided(run(plain)[1][-1], 7.5)
        assert handle.summary().split()[0] == "F" * last + "H"
    expected = float((half - stock).square().mean())
    assert losses.of(last, "H", (last - 1,), last - 1) == pytest.approx(expected, rel=1e-3)
    assert losses.of(last, "F", (), -1) == 0.0


def test_a_state_of_the_step_itself_loses_nothing_and_a_line_of_states_is_met(plain):
    calls, losses, left_out, tap = measured_losses(plain, 7.5)
    for call in calls:
        assert losses.change(call, [call], plain.unet, left_out).abs().max() < 1e-6
    base, slope = calls[0].hidden, torch.randn_like(calls[0].hidden) / 1000
    lined = [
        Call(c.step, c.level, c.given, c.output, base + c.level * slope)
        for c in (calls[1], calls[3], calls[4])
    ]
    exact = cheap_call(plain.unet, left_out, lined[2].given, lined[2].hidden) - calls[4].sample
    first = losses.change(lined[2], lined[:2], plain.unet, left_out)
    kept = losses.change(lined[2], lined[1:2], plain.unet, left_out)
    assert torch.allclose(first, exact, atol=1e-5)
    assert (kept - exact).abs().max() > 1e-4
    tap.remove()


def test_without_guidance_no_half_call_is_measured(plain):
    calls, losses, _, tap = measured_losses(plain, None)
    tap.remove()
    change = losses.of(3, "f", (1, 2), 2)
    assert change > 0
    with pytest.raises(KeyError):
        losses.of(3, "H", (2,), 2)
    assert len(calls) == STEPS


def compared(pipe, recipe):
    """Distance of the final latents and the calls, by patching as a user does."""
    stock, _ = run(pipe)
    with apply_agentsd(pipe, recipe=recipe) as handle:
        patched, _ = run(pipe)
        calls = handle.summary().split()[0]
    moved = (patched - stock).double().square().mean() / stock.double().square().mean()
    return float(moved.sqrt()), calls


def test_the_goal_is_met_and_the_pipeline_is_left_as_it_was(pipe, tmp_path):
    """The default scheduler repeats a step, whose calls share what they are."""
    before, (stock, _) = snapshot(pipe.unet), run(pipe)
    told = []
    found = calibrate_calls(pipe, ["a cat"], speedup=1.6, on_step=lambda *step: told.append(step), **SETTINGS)
    assert snapshot(pipe.unet) == before
    assert torch.equal(run(pipe)[0], stock)
    assert calibrate_calls(pipe, ["a cat"], speedup=1.6, **SETTINGS) == found  # nothing is left to chance
    distance, calls = compared(pipe, found)
    figures = found.measured
    assert figures["speedup"] >= 1.6
    assert figures["predicted"]["speedup"] == pytest.approx(figures["speedup"], rel=0.01)
    assert figures["distance"] == pytest.approx(distance, rel=1e-3)
    assert calls == figures["plan"][:2] + figures["plan"][1:]  # PLMS makes the second step twice
    assert [done for done, _ in told] == list(range(1, len(told) + 1))
    assert told[-1][0] == told[-1][1]
    names = ("steps", "sampler", "size", "prompts", "cost", "seed", "goal")
    assert [figures[name] for name in names] == [
        STEPS, "PNDMScheduler", [32, 32], ["a cat"], "multiply_adds", 0, {"speedup": 1.6}
    ]  # fmt: skip
    for row in figures["fewer_steps"]:
        plain, _ = run(pipe, num_inference_steps=row["steps"])
        moved = (plain - stock).double().square().mean() / stock.double().square().mean()
        assert row["distance"] == pytest.approx(float(moved.sqrt()), rel=1e-3)
        assert row["speedup"] == pytest.approx((STEPS + 1) / (row["steps"] + 1))
    again = Recipe.load(found.save(tmp_path / "calls.yaml"))
    assert (again, again.measured) == (found, figures)


def test_the_fastest_plan_within_a_distance(plain):
    found = calibrate_calls(plain, ["a cat"], max_distance=0.02, **SETTINGS)
    distance, calls = compared(plain, found)
    assert distance <= 0.02
    assert found.measured["plan"] == calls
    assert found.measured["speedup"] > 1


def test_a_plan_is_of_cheap_calls_alone_without_guidance(plain):
    found = calibrate_calls(plain, ["a cat"], speedup=1.3, **SETTINGS | {"guidance_scale": 1.0})
    assert found.guidance is None
    assert set(found.measured["plan"]) == {"F", "f"}


def test_samplers_of_two_calls_a_step(make_pipeline):
    pipe = make_pipeline(scheduler=HeunDiscreteScheduler(**BETAS, steps_offset=1))
    found = calibrate_calls(pipe, ["a cat"], speedup=1.5, **SETTINGS)
    assert compared(pipe, found)[0] == pytest.approx(found.measured["distance"], rel=1e-3)
    assert found.measured["speedup"] >= 1.5


@pytest.mark.parametrize("place", [0, 3, STEPS + 3, STEPS + 8])
def test_an_interruption_leaves_the_pipeline_as_it_was(plain, place):
    """In the recording, in the table, in a weighed run, and in a run under a plan."""
    before, (stock, _) = snapshot(plain.unet), run(plain)

    def stop(done, total):
        if done > place:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrate_calls(plain, ["a cat"], speedup=1.5, on_step=stop, **SETTINGS)
    assert snapshot(plain.unet) == before
    assert torch.equal(run(plain)[0], stock)


def test_a_model_that_fails_leaves_the_pipeline_as_it_was(plain):
    before, calls = snapshot(plain.unet), []

    def fail(*args):
        calls.append(1)
        if len(calls) == STEPS + 5:
            raise RuntimeError("out of memory")

    hook = plain.unet.conv_out.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        calibrate_calls(plain, ["a cat"], speedup=1.5, **SETTINGS)
    hook.remove()
    assert snapshot(plain.unet) == before


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"speedup": None}, ValueError, "speedup=None, max_distance=None: give one goal"),
        ({"max_distance": 0.1}, ValueError, "speedup=1.5, max_distance=0.1: give one goal"),
        ({"speedup": 1.0}, ValueError, r"speedup=1\.0: pass more than 1"),
        ({"speedup": None, "max_distance": -1}, ValueError, "max_distance=-1: pass more than 0"),
        ({"prompts": "a cat"}, ValueError, "prompts='a cat': pass a list"),
        ({"cost": "flops"}, ValueError, "cost='flops': choose 'time' or 'multiply_adds'"),
        ({"num_inference_steps": 5}, ValueError, "num_inference_steps=5: pass 8 or more"),
        ({"timesteps": [1, 2]}, ValueError, r"timesteps=\[1, 2\]: leave it out"),
        ({"output_type": "pil"}, ValueError, "output_type='pil': leave it out"),
    ],
)
def test_wrong_arguments_are_named_before_any_run(plain, monkeypatch, changes, error, message):
    monkeypatch.setattr(type(plain), "__call__", lambda *args, **kwargs: pytest.fail("it was run"))
    with pytest.raises(error, match=message):
        calibrate_calls(plain, **{"prompts": ["a cat"], "speedup": 1.5} | changes)


def test_what_cannot_be_calibrated_is_refused_before_any_run(plain, monkeypatch):
    monkeypatch.setattr(type(plain), "__call__", lambda *args, **kwargs: pytest.fail("it was run"))
    with pytest.raises(TypeError, match="is no pipeline with a `unet`"):
        calibrate_calls(plain.unet, ["a cat"], speedup=1.5)
    with apply_agentsd(plain), pytest.raises(ValueError, match=r"call remove_agentsd\(pipe\) first"):
        calibrate_calls(plain, ["a cat"], speedup=1.5)
    compiled = copy.copy(plain)
    compiled.unet = make_unet()
    compiled.unet.compile()
    with pytest.raises(ValueError, match="calibrate first, and compile it afterwards"):
        calibrate_calls(compiled, ["a cat"], speedup=1.5)


def test_a_goal_out_of_reach_says_what_can_be_had(plain):
    with pytest.raises(ValueError, match=r"speedup=99 cannot be met in these runs: the greatest is about \d"):
        calibrate_calls(plain, ["a cat"], speedup=99, **SETTINGS)


def test_a_sampler_that_nothing_is_left_out_of_is_refused(make_pipeline):
    pipe = make_pipeline(scheduler=LCMScheduler(**BETAS, steps_offset=1))
    before = snapshot(pipe.unet)
    with (
        pytest.warns(UserWarning, match="LCMScheduler is for few steps"),
        pytest.raises(ValueError, match="nothing was left out of a run under a plan"),
    ):
        calibrate_calls(pipe, ["a cat"], speedup=1.3, **SETTINGS)
    assert snapshot(pipe.unet) == before


def test_time_may_be_the_cost(plain, monkeypatch):
    """By a clock that shows 2 s for the last layer of a pass, and 14 s for the middle one."""
    shown = 0.0

    def pass_by(seconds):
        nonlocal shown
        shown += seconds

    monkeypatch.setattr(time, "process_time", lambda: shown)
    plain.unet.conv_out.register_forward_hook(lambda m, args, out: pass_by(2 * len(args[0])))
    plain.unet.mid_block.resnets[0].register_forward_hook(lambda m, args, out: pass_by(14 * len(args[0])))
    found = calibrate_calls(plain, ["a cat"], speedup=2.0, cost="time", **SETTINGS)
    plan = found.measured["plan"]
    seconds = sum({"F": 32, "f": 4, "H": 16, "h": 2}[symbol] for symbol in plan)
    assert found.measured["cost"] == "time"
    assert found.measured["speedup"] == pytest.approx(32 * STEPS / seconds)
    assert found.measured["predicted"]["speedup"] == pytest.approx(32 * STEPS / seconds, rel=0.01)


def test_a_plan_serves_another_number_of_steps(plain):
    found = calibrate_calls(plain, ["a cat"], speedup=1.5, **SETTINGS)
    with apply_agentsd(plain, recipe=found) as handle:
        run(plain, num_inference_steps=12)
        calls = handle.summary().split()[0]
    assert (len(calls), calls[0]) == (12, "F")
    assert calls.count("F") == found.measured["plan"].count("F")


def test_weights_lie_on_lines_of_their_logarithms():
    weights = {2: 1.0, 4: 100.0}
    assert [_between(weights, step) for step in range(6)] == pytest.approx([1, 1, 1, 10, 100, 100])
    assert _between({}, 3) == 1.0


@pytest.mark.parametrize(("distance", "beaten"), [(0.09, False), (0.11, True)])
def test_fewer_steps_are_judged_at_the_plans_cost(distance, beaten):
    """10 steps at a speed-up of 4 are 2.5: between 2 steps at 0.2 and 3 at 0.05, so at 0.1."""

    class Steps:
        def compare(self, recipe, tick, num_inference_steps):
            assert recipe is None
            return Figures(10 / num_inference_steps, {2: 0.2, 3: 0.05}[num_inference_steps], "")

    found = _fewer_steps(Steps(), 10, Figures(4.0, distance, "F"), lambda: None)
    assert found["beaten_by_fewer_steps"] is beaten
    assert [row["steps"] for row in found["fewer_steps"]] == [2, 3]
