"""What a scheduler's impulse response is found by: a copy that touches nothing of the user's.

The oracle is the response of a scheduler of the same settings that nobody has touched.
"""

import random
from dataclasses import astuple

import diffusers
import numpy as np
import pytest
import torch
from callers import Host, ddim, letters, loop
from logs import logged, warned
from sampling import SAMPLERS
from tiny import BETAS, make_small_unet

from agentsd import Recipe, StepCache, apply_agentsd
from agentsd.sampler import fingerprint, impulse_response


def make(name):
    scheduler = SAMPLERS[name].make()
    scheduler.set_timesteps(12)
    return scheduler


def same(one, other):
    return all(map(np.array_equal, astuple(one), astuple(other)))


def log_steps(scheduler, calls):
    own = scheduler.step
    scheduler.step = lambda *args, **kwargs: calls.append(args) or own(*args, **kwargs)


def compile_step(scheduler, calls):
    scheduler.step = torch.compile(scheduler.step, backend="eager")


def log_inputs(scheduler, calls):
    scheduler.scale_model_input = lambda x, *_: calls.append(x) or x


@pytest.mark.parametrize("name", ["Euler", "Euler a", "DPM++ 2M", "UniPC", "PLMS", "SA-Solver"])
def test_what_hangs_on_a_scheduler_is_not_called(name):
    """Nor is the scheduler changed; and a default dtype of half precision changes nothing."""
    untouched = make(name)
    for wrap in (log_steps, compile_step, log_inputs):
        wrap(scheduler := make(name), calls := [])
        before, state = torch.get_rng_state(), str(vars(scheduler))
        found = impulse_response(scheduler)
        torch.set_default_dtype(torch.float16)
        try:
            assert same(found, impulse_response(untouched))
        finally:
            torch.set_default_dtype(torch.float32)
        assert not calls
        assert fingerprint(scheduler) == fingerprint(untouched)
        assert torch.equal(torch.get_rng_state(), before)
        assert str(vars(scheduler)) == state


class Noisy(diffusers.DDIMScheduler):
    """Draws without a generator, from every global source, and writes the next latent into the given one."""

    noise = 1.0

    def step(self, model_output, timestep, sample, **kwargs):
        kwargs.pop("generator", None)
        noise = self.noise * torch.randn_like(sample) * float(np.random.rand()) * random.random()
        result = super().step(model_output, timestep, sample, **kwargs)
        return (sample.copy_(result[0] + noise), *result[1:])


class InPlace(Noisy):
    noise = 0.0


def test_global_random_numbers_go_on_as_if_none_had_been_drawn():
    """And the latents that a sampler writes into are those of one that doesn't."""
    for kind in (Noisy, InPlace):
        scheduler = kind(**BETAS, clip_sample=False)
        scheduler.set_timesteps(12)
        made = []
        for probe in (False, True):
            torch.manual_seed(3), np.random.seed(3), random.seed(3)
            response = impulse_response(scheduler) if probe else None
            made.append((torch.rand(2).tolist(), np.random.rand(), random.random()))
        assert made[0] == made[1]
        assert response.noisy == (kind is Noisy)
        assert np.allclose(response.outputs, impulse_response(ddim(12)).outputs, atol=1e-5)


@pytest.mark.parametrize("held", [make_small_unet, torch.Generator, lambda: lambda x: x, object])
def test_what_cannot_be_copied_is_not_probed(held):
    """A model is not even looked at; nothing is remembered of it."""
    host = Host(make_small_unet(), ddim(12))
    handle = apply_agentsd(host, recipe=Recipe(steps=StepCache(2)))
    for corrected in (False, True):
        host.scheduler.set_timesteps(12)
        host.scheduler.mine = 1 if corrected else held()
        with logged() if corrected else warned("can't be stepped alone"):
            loop(host.unet, host.scheduler)
        assert ("corrected" in handle.summary()) == corrected
        assert letters(handle) == "Ff" * 6


def test_a_response_is_kept_by_all_that_a_scheduler_holds():
    """Its lists and numbers, whatever its config says."""
    one, other, third = ddim(12), ddim(12), ddim(12)
    assert fingerprint(one) == fingerprint(other)
    other.alphas_cumprod = other.alphas_cumprod**1.1
    assert not same(impulse_response(one), impulse_response(other))
    third.eta = 0.3
    assert fingerprint(one) not in (fingerprint(other), fingerprint(third))
