"""What calls with caching ask of the device on SD 1.5's structure: counted, not timed."""

import pytest
import torch
from callers import Host
from diffusers import DDIMScheduler, UNet2DConditionModel
from launches import Launches

from agentsd import Recipe, StepCache, apply_agentsd

BASELINE = 727  # launches of a guided step
LAST_LAYERS = 60  # of a cached one
WAITS = ("_local_scalar_dense", "equal", "nonzero", "is_nonzero")


@pytest.fixture(scope="module")
def unet():
    """SD 1.5's U-Net, narrow."""
    torch.manual_seed(0)
    widths = {"block_out_channels": (32, 64, 128, 128), "cross_attention_dim": 32, "norm_num_groups": 8}
    return UNet2DConditionModel(sample_size=16, **widths).eval()


@torch.no_grad()
def run(unet, recipe, calls):
    """The launches of each call of a guided run."""
    scheduler = DDIMScheduler(clip_sample=False)
    scheduler.set_timesteps(20)
    rng = torch.Generator().manual_seed(0)
    latents = torch.cat([torch.randn(calls, 1, 4, 16, 16, generator=rng)] * 2, dim=1)
    text, counts = torch.randn(2, 77, 32, generator=rng), []
    host = Host(unet, scheduler)
    with apply_agentsd(host, recipe=recipe) as handle:
        for latent, t in zip(latents, scheduler.timesteps, strict=False):
            with Launches() as mode:
                unet(latent, t, text)
            counts.append(mode.counts)
        return handle.summary().split()[0], counts


def test_launches_of_each_kind_of_call(unet):
    """A few for what a call leaves and takes."""
    assert run(unet, Recipe(steps=StepCache(1)), 2)[1][1].total() == BASELINE
    symbols, counts = run(unet, Recipe(steps=StepCache(2, correct=False)), 8)
    assert symbols == "FfFfFfFf"
    assert counts[-2].total() == BASELINE + 1  # a state kept
    assert counts[-1].total() == LAST_LAYERS + 2  # a line


@pytest.mark.parametrize("cached", [1, 2])
def test_launches_of_a_correction(unet, cached):
    """The last layers once more, however many steps were cached, and a few for each."""
    symbols, counts = run(unet, Recipe(steps=StepCache(cached + 1)), 2 * cached + 3)
    assert symbols == "F" + 2 * ("f" * cached + "F")
    assert counts[-2].total() == LAST_LAYERS + 4  # a line; the latent and the output cloned
    # One state kept; a parabola, and how the output changes on it; for each cached step its share of that,
    # added, and subtracted. An error of the latent is a term for each error before, and a sum: in the second
    # cached step's output, in the own one, and in what mends it.
    errors = sum(n + 1 for n in range(1, cached)) + 2 * (cached + 1)
    assert counts[-1].total() == BASELINE + 1 + LAST_LAYERS + 3 + 1 + 3 * cached + errors


@pytest.mark.parametrize("order", [0, 1])
def test_no_call_waits_for_the_device_once_a_run_is_known(unet, order):
    recipe = Recipe(steps=StepCache(2, extrapolation_order=order))
    symbols, counts = run(unet, recipe, 10)
    assert symbols == "FfFfFfFfFf"
    assert not any(call[name] for call in counts[1:] for name in WAITS)
