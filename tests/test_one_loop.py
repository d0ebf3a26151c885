"""The plugin against the method in one loop, which docs/explanation/step_caching.md shows."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from cache_twin import entrance
from callers import Host, inputs, letters
from one_loop import denoise
from recipes import STEP_CACHING
from sampling import SAMPLERS
from tiny import make_small_unet

from agentsd import Recipe, StepCache, apply_agentsd

make_unet = partial(make_small_unet, layers_per_block=2)


def set_to(name, steps=14):
    scheduler = SAMPLERS[name].make()
    scheduler.set_timesteps(steps)
    return scheduler


def parts(unet, text):
    """A U-Net as the two functions: all of it is computed in each, and the state is taken or replaced."""

    def call(x, t, hook):
        handle = entrance(unet).register_forward_hook(hook)
        output = unet(x, t, text).sample
        handle.remove()
        return output

    def deep(x, t):
        seen = []
        call(x, t, lambda module, args, out: seen.append(out[0] if isinstance(out, tuple) else out))
        return seen[0]

    def last(x, t, state):
        return call(x, t, lambda module, args, out: (state,) if isinstance(out, tuple) else state)

    return deep, last


def plugged(name, recipe, x, text):
    """The last latents of a loop on a patched U-Net, and what its calls were."""
    unet, scheduler = make_unet(), set_to(name)
    handle = apply_agentsd(host := Host(unet, scheduler), recipe=recipe)
    for t in scheduler.timesteps:
        x = scheduler.step(host.unet(scheduler.scale_model_input(x, t), t, text).sample, t, x).prev_sample
    return x, letters(handle)


@pytest.mark.parametrize("steps", [STEP_CACHING.steps, StepCache(3, warmup_steps=2)], ids=["fast", "threes"])
@pytest.mark.parametrize("name", ["DDIM", "Euler, Karras", "DPM++ 2M, Karras", "UniPC", "DEIS"])
@torch.no_grad()
def test_the_plugin_is_the_loop(name, steps):
    """To rounding; what corrections change is far more than that."""
    scheduler, (x, text) = set_to(name), inputs()
    x = x * scheduler.init_noise_sigma
    made, symbols = plugged(name, Recipe(steps=steps), x, text)
    computed = [letter == "F" for letter in symbols]
    assert computed == steps.full_steps(14)
    expected = denoise(*parts(make_unet(), text), scheduler, x, computed)
    uncorrected, _ = plugged(name, Recipe(steps=replace(steps, correct=False)), x, text)
    rounding, corrected = ((one - expected).norm() / expected.norm() for one in (made, uncorrected))
    assert rounding < 2e-5
    assert corrected > 50 * rounding
