"""Devices without float64 and some operators (Apple's MPS), default devices, and the user's random state.

And a CUDA device repeats bits: no operation that sums in an order of its own is asked for in a run.
"""

from contextlib import nullcontext
from itertools import cycle, pairwise

import numpy as np
import pytest
import torch
from agentsd_eval.cost import latency
from agentsd_eval.quality.features import load_network
from agentsd_eval.quality.perceptual import PerceptualFeatures, StageFeatures
from devices import PLACES, Asked, LikeMPS
from PIL import Image
from random_state import untouched
from sampling import SAMPLERS
from tiny import make_unet
from torch.nn.functional import adaptive_avg_pool2d

from agentsd import ByDistance, Phases, Recipe, ResidualSharing, StepCache, apply_agentsd
from agentsd.attention import Agents, Downsample, Merge, PooledAgents, merging, pooling
from agentsd.attention.matching import rank_tokens, sample_destinations, split_grid
from agentsd.recipe import MODES

RECIPES = {
    **MODES,
    "on residuals": Recipe(Phases(Agents(), Merge()), residual=ResidualSharing(2), steps=StepCache()),
    "merged": Recipe(Merge(0.5)),
    "downsampled": Recipe(Downsample()),
    "pooled": Recipe(Phases(PooledAgents(5), PooledAgents(5, ratio=0.4))),
    "by distance": Recipe(ByDistance((PooledAgents(9), PooledAgents(4)), (0.9,))),
}
MERGING = {"agentsd", "on residuals", "merged", "pooled"}


@torch.no_grad()
def run(unet, sampler, around):
    """The last latents; each call of the U-Net is made within what `around` makes."""
    rng, scheduler = torch.Generator("cpu").manual_seed(0), SAMPLERS[sampler].make()
    latent, text = torch.randn(1, 4, 15, 18, generator=rng), torch.randn(2, 7, 16, generator=rng)
    more = {"generator": rng} if sampler == "Euler a" else {}
    scheduler.set_timesteps(8)
    for t in scheduler.timesteps:
        inputs = scheduler.scale_model_input(torch.cat([latent, latent]), t)
        with around():
            without, withs = unet(inputs, int(t) if sampler == "DDIM" else t, text).sample.chunk(2)
        latent = scheduler.step(without + 3 * (withs - without), t, latent, **more).prev_sample
    return latent


@pytest.mark.parametrize(
    ("name", "sampler"), [*zip(RECIPES, cycle(["DDIM", "PLMS", "DPM++ 2M, Karras", "Euler", "Euler a"]))]
)
def test_every_recipe_runs_on_every_device(name, sampler):
    """Where there is no float64, under another default device, and without a touch of the random state.

    The default is the meta device, whose tensors have no numbers: what lands there by chance can't be read.
    """
    unet, asked = make_unet(), Asked()
    with untouched(), apply_agentsd(unet, recipe=RECIPES[name]):
        expected, without, elsewhere, counted = (
            run(unet, sampler, around)
            for around in (nullcontext, LikeMPS, lambda: torch.device("meta"), lambda: asked)
        )
    torch.testing.assert_close(without, expected, rtol=0, atol=2e-3)
    assert torch.equal(elsewhere, expected)
    assert torch.equal(counted, expected)
    assert bool(PLACES & asked.names) == (name in MERGING)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merging_without_the_missing_operator(dtype):
    """The oracle is a loop over the members of each row."""
    tokens = torch.randn(2, 30, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    partition = split_grid(5, 6, 2, sample_destinations(5, 6, 2, (0, 0, 0.0)))
    ranking = rank_tokens(tokens, partition)
    merge_map = merging.join(*(merging.make_merge_map(ranking, r, dtype) for r in (12, 20)))[0]
    flat, members = tokens.flatten(0, 1).double(), merge_map.members.tolist()
    expected = torch.stack([flat[members[a:b]].mean(0) for a, b in pairwise(merge_map.offsets.tolist())])
    with LikeMPS():
        made = merging.merge_rows(tokens, merge_map)
    assert made.dtype == dtype
    torch.testing.assert_close(made.double(), expected, rtol=0, atol=1e-6 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("sizes", [(7, 9, 3, 4), (8, 8, 3, 3), (5, 5, 5, 2), (6, 4, 1, 3)])
def test_pooling_by_products(sizes):
    height, width, rows, cols = sizes
    grid = torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(0))
    made = pooling.multiply(grid, rows, cols)
    torch.testing.assert_close(made, adaptive_avg_pool2d(grid, (rows, cols)), rtol=0, atol=1e-6)


def test_what_the_evaluation_runs_on_the_device_needs_no_float64():
    """Features, perceptual distance and a timed call: the numbers after them are numpy's, on the CPU."""
    images = [Image.effect_noise((64, 64), sigma).convert("RGB") for sigma in (30, 60)]
    pipe = type("Pipe", (), {"unet": make_unet(), "vae_scale_factor": 8})()
    call = latency.forward_call(pipe, latency.Case("forward early", 128, 1), 7.5)
    found = []
    for around in (nullcontext, LikeMPS):
        with around(), torch.no_grad():
            features = load_network("efficientnet-lite0", torch.device("cpu"))(images)
            stages = StageFeatures(torch.device("cpu"))
            one, other = (PerceptualFeatures(stages, [image]) for image in images)
            found.append((features, one.distance(other), call().sample.numpy()))
    for expected, made in zip(*found, strict=True):
        np.testing.assert_allclose(made, expected, atol=1e-5)
