"""What cached steps got wrong, made up for by the full steps after them."""

import inspect
import math
from dataclasses import replace
from itertools import pairwise

import diffusers
import pytest
import torch
from callers import RUN, Caller, ddim, draw
from logs import warned
from sampling import SAMPLERS, Denoiser
from tiny import BETAS, make_small_unet
from tiny import training_sigma as sigma

from agentsd import Recipe, StepCache, apply_agentsd, planning
from agentsd.memory import CachedFeatures, Corrections
from agentsd.plan import Call
from agentsd.sampler import Sampler, impulse_response

LINEAR = [name for name, sampling in SAMPLERS.items() if not sampling.says.startswith("off")]


def made(name):
    sampling = SAMPLERS[name]
    return sampling.make(prediction_type=sampling.predictions[0])


class Latents:
    """The latents of a run under a sampler, each call of which gives what it is told."""

    def __init__(self, name, steps):
        self.scheduler, self.more = made(name), {}
        self.scheduler.set_timesteps(steps)
        self.now = torch.randn(1, 1, 3, 4, generator=torch.Generator().manual_seed(1))
        if "generator" in inspect.signature(self.scheduler.step).parameters:
            self.more = {"generator": torch.Generator().manual_seed(2)}

    def model_input(self, i):
        return self.scheduler.scale_model_input(self.now, self.scheduler.timesteps[i])

    def step(self, i, output):
        t = self.scheduler.timesteps[i]
        self.now = self.scheduler.step(output, t, self.now, return_dict=False, **self.more)[0]


@pytest.mark.parametrize("name", LINEAR)
def test_the_latent_is_where_every_step_computed_would_have_taken_it(name):
    """After each full call, whatever the cached ones before it gave; the model answers to its input as
    Gaussian data do."""
    rng = torch.Generator().manual_seed(0)
    right, run = Latents(name, 13), Latents(name, 13)
    timesteps = run.scheduler.timesteps.tolist()
    sampler, response = Sampler(run.scheduler, timesteps), impulse_response(run.scheduler)
    corrections, pending, seen = Corrections(sampler, response, 0), [], []
    features, known = CachedFeatures(1, interpolates=True), []
    slope, of_state = torch.randn(1, 1, 3, 4, generator=rng), 1.0
    steps_of_calls = list(dict.fromkeys(sampler.step_of_call))
    for i in range(len(timesteps)):
        step = steps_of_calls.index(sampler.step_of_call[i])
        output = torch.randn(1, 1, 3, 4, generator=rng)
        moved = sampler.sensitivity(i) * (run.model_input(i) - right.model_input(i))
        level = sampler.sigmas and sampler.sigmas[i]
        if step > 2 and step % 4 != 1:
            call = Call(None, 0.0, i, sigma=level)
            if level is not None:  # a state's extrapolation is off by how far it is from both that are known
                before, last = known[-2:]
                of_state = (level - before) * (level - last) / (last - before) ** 2
            call.output = output + moved + of_state * slope
            given = call.given = corrections.make_up(i, call.output)
            pending.append(call)
        else:
            features.keep(level, [])
            if pending:
                corrections.note(pending, features, pending[-1].output - of_state * slope)
            others = [one for one in known if one is None or not math.isclose(one, level, rel_tol=1e-4)]
            known = [*others, level]
            pending, given = [], corrections.correct(i, output + moved)
        right.step(i, output)
        run.step(i, given)
        off = float((run.now - right.now).abs().max() / right.now.abs().max())
        seen.append((bool(pending), off))
    moves = [bool(abs(row).max()) for row in response.outputs[1:] - response.outputs[:-1]]
    assert max(off for cached, off in seen if cached) > 0.01
    ends = [off for (cached, off), any_move in zip(seen, moves, strict=True) if any_move and not cached]
    assert max(ends) < 1e-4


@pytest.mark.parametrize("name", ["DDIM", "Euler, Karras", "EDM Euler", "DPM++ 2M, flow", "Heun"])
def test_how_an_error_of_the_latent_moves_the_output(name):
    """Against the exact model of Gaussian data of unit variance, in each form of prediction."""
    for prediction in SAMPLERS[name].predictions:
        model = Denoiser(SAMPLERS[name], prediction)
        model.mean = torch.zeros(1, 1, 1, 1, dtype=torch.float64)
        sampler = Sampler(model.scheduler, model.scheduler.timesteps.tolist())
        for i in (0, 7, 19):
            ends = []
            for value in (0.0, 1.0):
                x = torch.full((1, 1, 1, 1), value, dtype=torch.float64)
                model._exact(None, (x, model.scheduler.timesteps[i]))
                ends.append(float(model.exact))
            assert sampler.sensitivity(i) == pytest.approx(ends[1] - ends[0], abs=1e-4)


def test_a_sampler_that_is_not_linear_is_not_corrected(make_pipeline, sample):
    pipe = make_pipeline(scheduler=ddim(thresholding=True))
    handle = apply_agentsd(pipe, recipe=Recipe(steps=StepCache()))
    with warned("is not linear in what the U-Net gives"):
        image = draw(pipe, **RUN)
    assert "corrected" not in handle.summary()
    apply_agentsd(pipe, recipe=Recipe(steps=replace(handle.recipe.steps, correct=False)))
    assert torch.equal(sample(pipe, **RUN), image)


def test_img2img_begins_in_the_middle_of_the_list():
    scheduler = made("UniPC")
    scheduler.set_timesteps(20)
    scheduler.set_begin_index(8)
    response = impulse_response(scheduler, 8)
    assert not response.outputs[:9].any()
    assert response.outputs[9, 8]


def test_without_a_scheduler_noise_levels_are_stable_diffusions():
    timesteps = [901.0, 601.0, 301.0, 1.0]
    assert Sampler(None, timesteps).sigmas == pytest.approx([sigma(t) for t in timesteps])


def test_a_response_is_worked_out_once_for_a_list_of_timesteps(monkeypatch):
    begun = []
    monkeypatch.setattr(
        planning, "impulse_response", lambda *args: begun.append(1) or impulse_response(*args)
    )
    caller = Caller(10)
    apply_agentsd(host := caller.pipe(make_small_unet()), recipe=Recipe(steps=StepCache(2)))
    for steps, runs in ((10, 1), (10, 1), (11, 2), (10, 3)):
        host.scheduler.set_timesteps(steps)
        latent = torch.zeros(2, 4, 16, 16)
        with torch.no_grad():
            for t in host.scheduler.timesteps:
                host.unet(latent, t, caller.text)
        assert len(begun) == runs


@pytest.mark.parametrize("betas", [{}, BETAS, {"beta_schedule": "squaredcos_cap_v2"}])
def test_noise_levels_are_the_schedulers_own(betas):
    """The oracle is the scheduler's own step: with the output 0 its latent shrinks by the ratio of alphas."""
    scheduler = diffusers.DDIMScheduler(**betas, clip_sample=False, steps_offset=1)
    scheduler.set_timesteps(12)
    sigmas = Sampler(scheduler, scheduler.timesteps.tolist()).sigmas
    for t, (level, following) in zip(scheduler.timesteps, pairwise(sigmas), strict=False):
        one = torch.ones(1, 1, 1, 1, dtype=torch.float64)
        # epsilon moves y by the change of level, and y is x sqrt(1 + level**2)
        before, after = (1 + level**2) ** 0.5, (1 + following**2) ** 0.5
        moved = float(scheduler.step(one, t, 0 * one).prev_sample)
        assert moved * after == pytest.approx(following - level, rel=1e-3)
        grown = float(scheduler.step(0 * one, t, one).prev_sample)
        assert grown * after == pytest.approx(before, rel=1e-3)
