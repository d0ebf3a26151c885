"""What a scheduler's impulse response is found by: a copy that touches nothing of the user's.

The oracle is the response of a scheduler of the same settings that nobody has touched.
"""

import random

import diffusers
import numpy as np
import pytest
import torch
from callers import Host, ddim, draw, letters
from logs import warned
from tiny import BETAS, make_small_unet

from agentsd import Recipe, StepCache, apply_agentsd
from agentsd.sampler import fingerprint, impulse_response

CACHED = Recipe(steps=StepCache(2))
KINDS = {
    "Euler": diffusers.EulerDiscreteScheduler,
    "DPM++ 2M": diffusers.DPMSolverMultistepScheduler,
    "UniPC": diffusers.UniPCMultistepScheduler,
    "PLMS": diffusers.PNDMScheduler,
    "SA-Solver": diffusers.SASolverScheduler,
}


def make(name, cls=None):
    more = {"skip_prk_steps": True} if name == "PLMS" else {}
    scheduler = (cls or KINDS[name])(**BETAS, **more)
    scheduler.set_timesteps(12)
    return scheduler


def same(one, other):
    return all(
        np.array_equal(getattr(one, name), getattr(other, name))
        for name in ("outputs", "latent", "input_scale")
    )


def logged_step(scheduler, calls):
    own = scheduler.step

    def step(*args, **kwargs):
        calls.append(args)
        return own(*args, **kwargs)

    scheduler.step = step


WRAPPERS = {
    "a logger": logged_step,
    "torch.compile": lambda s, calls: setattr(s, "step", torch.compile(s.step, backend="eager")),
    "scale_model_input": lambda s, calls: setattr(s, "scale_model_input", lambda x, *_: calls.append(x) or x),
}


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("how", WRAPPERS)
def test_what_hangs_on_a_scheduler_is_not_called(name, how):
    scheduler, calls = make(name), []
    before = fingerprint(scheduler)
    WRAPPERS[how](scheduler, calls)
    assert same(impulse_response(scheduler), impulse_response(make(name)))
    assert not calls
    vars(scheduler).pop("step", None)
    vars(scheduler).pop("scale_model_input", None)
    assert fingerprint(scheduler) == before


def test_a_run_under_a_logger_is_that_without_one(make_pipeline):
    images = []
    for wrap in (None, logged_step):
        pipe = make_pipeline(scheduler=diffusers.EulerDiscreteScheduler(**BETAS))
        if wrap is not None:
            wrap(pipe.scheduler, calls := [])
        handle = apply_agentsd(pipe, recipe=CACHED)
        images.append(draw(pipe, num_inference_steps=12))
    assert torch.equal(*images)
    assert len(calls) == 12
    assert "corrected" in handle.summary()


class Noisy(diffusers.DDIMScheduler):
    """Draws without a generator, from every global source."""

    def step(self, model_output, timestep, sample, **kwargs):
        kwargs.pop("generator", None)
        noise = torch.randn_like(sample) * float(np.random.rand()) * random.random()
        result = super().step(model_output, timestep, sample, **kwargs)
        return (result[0] + noise, *result[1:])


def test_global_random_numbers_go_on_as_if_none_had_been_drawn():
    scheduler = Noisy(**BETAS, clip_sample=False)
    scheduler.set_timesteps(12)
    made = []
    for probe in (False, True):
        torch.manual_seed(3), np.random.seed(3), random.seed(3)
        response = impulse_response(scheduler) if probe else None
        made.append((torch.rand(2).tolist(), np.random.rand(), random.random()))
    assert made[0] == made[1]
    assert response.noisy
    assert np.allclose(response.outputs, impulse_response(ddim(12)).outputs, atol=1e-5)


class InPlace(diffusers.DDIMScheduler):
    """Writes the next latent into the one it is given."""

    def step(self, model_output, timestep, sample, **kwargs):
        result = super().step(model_output, timestep, sample, **kwargs)
        return (sample.copy_(result[0]), *result[1:])


def test_a_sampler_that_writes_into_its_latent_has_its_response():
    scheduler = InPlace(**BETAS, clip_sample=False)
    scheduler.set_timesteps(12)
    assert same(impulse_response(scheduler), impulse_response(ddim(12)))


@pytest.mark.parametrize("held", [make_small_unet, torch.Generator, lambda: lambda x: x, object])
def test_what_cannot_be_copied_is_not_probed(held):
    """A model is not even looked at; nothing is remembered of it."""
    unet, scheduler = make_small_unet(), ddim(12)
    scheduler.mine = held()
    handle = apply_agentsd(host := Host(unet, scheduler), recipe=CACHED)
    noise, text = torch.zeros(2, 4, 16, 16), torch.zeros(2, 7, 16)
    with torch.no_grad():
        for corrected in (False, True):
            with warned("can't be stepped alone") if not corrected else torch.no_grad():
                for t in scheduler.timesteps:
                    unet(noise, t, text)
            assert ("corrected" in handle.summary()) == corrected
            assert letters(handle) == "Ff" * 6
            del scheduler.mine
            if not corrected:
                scheduler.set_timesteps(12)
            else:
                break
            scheduler.mine = 1
    assert host.scheduler is scheduler


def test_a_response_is_kept_by_all_that_a_scheduler_holds():
    """Its lists and numbers, whatever its config says."""
    one, other = ddim(12), ddim(12)
    assert fingerprint(one) == fingerprint(other)
    other.alphas_cumprod = other.alphas_cumprod**1.1
    assert fingerprint(one) != fingerprint(other)
    assert not same(impulse_response(one), impulse_response(other))
    other = ddim(12)
    other.eta = 0.3
    assert fingerprint(one) != fingerprint(other)


def test_a_failed_look_is_not_remembered(monkeypatch):
    looks = iter([True])
    monkeypatch.setattr(
        "agentsd.planning.impulse_response",
        lambda *args: None if next(looks, False) else impulse_response(*args),
    )
    handle = apply_agentsd(host := Host(make_small_unet(), ddim(12)), recipe=CACHED)
    noise, text = torch.zeros(2, 4, 16, 16), torch.zeros(2, 7, 16)
    for corrected in (False, True):
        host.scheduler.set_timesteps(12)
        with torch.no_grad():
            for t in host.scheduler.timesteps:
                host.unet(noise, t, text)
        assert ("corrected" in handle.summary()) == corrected
