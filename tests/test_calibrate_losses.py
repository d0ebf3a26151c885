"""The losses that plans are made from, against single runs under a patch."""

from __future__ import annotations

import pytest
import torch
from calibrating import MERGE, STEPS, run
from tiny import snapshot

from agentsd import GuidanceCache, Recipe, StepCache, apply_agentsd
from agentsd.cache.skipped import SkippedLayers
from agentsd.calibration.attention import (
    cost_of_layers,
    try_operator,
)
from agentsd.calibration.cost import macs
from agentsd.calibration.losses import Losses
from agentsd.calibration.measured import between
from agentsd.calibration.recording import Call, cached_step, record
from agentsd.hosts.models import EVERY_LEVEL, find_sites
from agentsd.hosts.schedulers import training_sigma as sigma


def recorded(pipe):
    """A baseline run's calls, and what its calls leave out."""
    skipped = SkippedLayers(pipe.unet, 1)
    tap = skipped.hook()
    calls, _ = record(pipe, pipe.unet, skipped, 0.4, lambda: run(pipe)[0])
    return calls, skipped, tap


def measured_losses(pipe, scale):
    """The recorded calls, their losses, and what measures more."""
    calls, skipped, tap = recorded(pipe)
    losses = Losses(scale, 3, 5)
    for place in range(len(calls)):
        losses.add(losses.measure(calls, place, pipe.unet, skipped))
    return calls, losses, skipped, tap


def guided(output, scale=7.5):
    without, with_prompt = output.double().chunk(2)
    return without + scale * (with_prompt - without)


def test_losses_are_those_of_a_run_with_one_such_call(plain):
    """The last step is the only one left out, so that all before it is the baseline's."""
    before = snapshot(plain.unet)
    calls, losses, _, tap = measured_losses(plain, 7.5)
    tap.remove()
    assert snapshot(plain.unet) == before
    assert [call.early for call in calls] == [True] * 3 + [False] * 5
    baseline = guided(run(plain)[1][-1])
    levels = tuple(call.level for call in calls)
    assert len(levels) == STEPS
    last = STEPS - 1
    for order in (0, 1):
        with apply_agentsd(
            plain, recipe=Recipe(steps=StepCache(extrapolation_order=order, computed_timesteps=levels[:-1]))
        ) as handle:
            cached = guided(run(plain)[1][-1])
            assert handle.summary().split()[0] == "F" * last + "f"
        computed = tuple(range(last))[-1 - order :]
        expected = float((cached - baseline).square().mean())
        assert expected > 0
        assert losses.of(last, "f", computed, last - 1) == pytest.approx(expected, rel=1e-3)
    with apply_agentsd(
        plain, recipe=Recipe(guidance=GuidanceCache(computed_timesteps=levels[:-1]))
    ) as handle:
        half = guided(run(plain)[1][-1])
        assert handle.summary().split()[0] == "F" * last + "H"
    expected = float((half - baseline).square().mean())
    assert losses.of(last, "H", (last - 1,), last - 1) == pytest.approx(expected, rel=1e-3)
    assert losses.of(last, "F", (), -1) == 0.0


def test_a_state_of_the_step_itself_loses_nothing_and_a_line_of_states_is_met(plain):
    calls, skipped, tap = recorded(plain)
    losses = Losses(7.5, 3, 5)
    for call in calls:
        assert losses.change(call, [call], plain.unet, skipped).abs().max() < 1e-6
    base, slope = calls[0].hidden, torch.randn_like(calls[0].hidden) / 1000
    lined = [
        Call(c.step, c.level, c.given, c.output, base + sigma(c.level) * slope, c.early)
        for c in (calls[1], calls[3], calls[4])
    ]
    exact = cached_step(plain.unet, skipped, lined[2].given, lined[2].hidden) - calls[4].sample
    first = losses.change(lined[2], lined[:2], plain.unet, skipped)
    kept = losses.change(lined[2], lined[1:2], plain.unet, skipped)
    assert torch.allclose(first, exact, atol=1e-5)
    assert (kept - exact).abs().max() > 1e-4
    tap.remove()


def test_an_operators_loss_and_saving_are_those_of_a_patched_call(plain):
    calls, _, tap = recorded(plain)
    tap.remove()
    site, losses = find_sites(plain.unet, EVERY_LEVEL, at_most=True)[1], Losses(7.5, 3, 5)
    call, unet = calls[5], plain.unet
    loss, spent = try_operator(unet, site, MERGE, call, losses, "macs")
    baseline = cost_of_layers(unet, find_sites(unet, EVERY_LEVEL, at_most=True), call, "macs")
    saved = baseline[site.name] - spent
    with torch.no_grad():
        before = macs(lambda: unet(**call.given))
        with apply_agentsd(unet, recipe=Recipe(layers={site.name: MERGE})):
            after = macs(lambda: unet(**call.given))
            changed = guided(unet(**call.given)[0])
    assert loss == pytest.approx(float((changed - guided(call.sample)).square().mean()), rel=1e-3)
    assert loss > 0
    assert saved == before - after > 0


def test_weights_lie_on_lines_of_their_logarithms():
    weights = {2: 1.0, 4: 100.0}
    assert [between(weights, step) for step in range(6)] == pytest.approx([1, 1, 1, 10, 100, 100])
    assert between({}, 3) == 1.0


def test_a_step_left_out_loses_what_the_line_of_predictions_misses(plain):
    calls, losses, _, tap = measured_losses(plain, 7.5)
    tap.remove()
    (first, last, call), outputs = (calls[i] for i in (2, 4, 5)), [guided(c.sample) for c in calls]
    assert losses.of(5, "s", (4,), -1) == pytest.approx(float((outputs[4] - outputs[5]).square().mean()))
    slope = (outputs[4] - outputs[2]) / (sigma(last.level) - sigma(first.level))
    line = outputs[4] + slope * (sigma(call.level) - sigma(last.level))
    assert losses.of(5, "s", (2, 4), -1) == pytest.approx(
        float((line - outputs[5]).square().mean()), rel=1e-4
    )
