"""What a guided call of SD 1.5's structure asks of the device, beside the baseline: counted, not timed."""

from dataclasses import replace

import pytest
import torch
from agentsd_eval.research.computed_cost import Kernels
from callers import Host
from diffusers import DDIMScheduler, UNet2DConditionModel
from recipes import AGENTS_CACHED, AGENTS_THEN_KEYS, STEP_CACHING

from agentsd import Agents, Recipe, ResidualSharing, StepCache, apply_agentsd

BASELINE = 726  # of a guided call
COPY = 1  # of a timestep that is an integer
LAST_LAYERS = 60  # of a cached call
NOTE = 2  # the latent and the output of each call of a run, cloned
LOOK = 4  # whether a call's latent follows from those: of each call on a CPU, of computed ones on a GPU
TIMESTEPS = torch.linspace(999, 0, 20)
EARLY, LATE = 0, 15


@pytest.fixture(scope="module")
def unet():
    """SD 1.5's U-Net, narrow."""
    torch.manual_seed(0)
    widths = {"block_out_channels": (32, 64, 128, 128), "cross_attention_dim": 32, "norm_num_groups": 8}
    return UNet2DConditionModel(sample_size=64, **widths).eval()


@torch.no_grad()
def launches(unet, timesteps):
    """Of guided calls on other latents each: as many as at any other size."""
    rng, counts = torch.Generator().manual_seed(0), []
    text = torch.randn(2, 77, 32, generator=rng)
    noise, other = torch.randn(2, 1, 4, 16, 16, generator=rng)
    for i, t in enumerate(timesteps):
        latent = (noise + 0.05 * i * other).repeat(2, 1, 1, 1)
        with Kernels() as mode:
            unet(latent, t, text)
        counts.append(mode.counts)
    return counts


def run(unet, recipe, calls):
    """The calls of a run of 20 steps, and their launches."""
    scheduler = DDIMScheduler(clip_sample=False)
    scheduler.set_timesteps(20)
    host = Host(unet, scheduler)
    with apply_agentsd(host, recipe=recipe) as handle:
        counts = launches(unet, scheduler.timesteps[:calls])
        return handle.summary().split()[0], counts


@pytest.fixture(scope="module")
def baseline(unet):
    """Of a call without agentsd."""
    return launches(unet, TIMESTEPS[:1])[0]


def added(unet, baseline, place):
    """What agents, or later keys, add to the baseline's or take from it, in the second call of a kind."""
    with apply_agentsd(unet, recipe=AGENTS_THEN_KEYS):
        patched = launches(unet, [TIMESTEPS[place]] * 2)[1]
    differences = {name: patched[name] - baseline[name] for name in patched | baseline}
    return {name: count for name, count in differences.items() if count}


def test_later_steps_with_fewer_keys_add_one_launch_a_layer(unet, baseline):
    """Ten layers pick their keys; that is all."""
    assert added(unet, baseline, LATE) == {"index_select": 10}


def test_early_steps_with_agents_add_what_their_algebra_asks_for(unet, baseline):
    """Ten layers of two levels; each level is ranked once, with a map for tokens and one for agents, joined.

    A layer merges, gathers, adds `kV`, unmerges, and divides by no rescale factor; a ranking has its product,
    norms and a sort; a map has a sort, too.
    """
    more = added(unet, baseline, EARLY)
    layers, levels = 10, 2
    assert sum(more.values()) == layers * 3 + levels * (8 + 2 * 10 + 5) == 96
    assert more["_embedding_bag_forward_only"] == layers
    assert (more["bmm"], more["max"], more["sort"]) == (levels, levels, 3 * levels)


def test_between_two_residuals_nothing_is_ranked(unet, baseline):
    """Ten layers add 40 launches, for agents and the sum; the residuals' line is two."""
    _, calls = run(unet, Recipe(Agents(), residual=ResidualSharing(least_tokens=0)), 5)
    more = {name: calls[-1][name] - baseline[name] for name in calls[-1] | baseline}
    assert sum(more.values()) == 10 * 4 + 2 + COPY + NOTE + LOOK
    assert (more["_foreach_mul"], more["_foreach_add_"]) == (1, 1)
    assert not more.get("sort")


def test_cached_agents_add_six_launches_to_a_cached_step(unet):
    """Merge, gather, + kV, unmerge, the residual and its line, less a division: beside step caching alone."""
    sharing = replace(AGENTS_CACHED, residual=replace(AGENTS_CACHED.residual, least_tokens=0))
    less, more = (
        [counts.total() for counts in run(unet, recipe, 20)[1]] for recipe in (STEP_CACHING, sharing)
    )
    added = [b - a for a, b in zip(less, more, strict=True)]
    assert added[3] == 6  # the first cached step
    assert sum(added) < 0.025 * sum(less)


def test_launches_of_each_kind_of_call(unet, baseline):
    """A few for what a call leaves and takes."""
    assert baseline.total() == BASELINE
    assert run(unet, Recipe(steps=StepCache(1)), 2)[1][1].total() == BASELINE + COPY
    symbols, counts = run(unet, Recipe(steps=StepCache(2, correct=False)), 8)
    assert symbols == "FfFfFfFf"
    assert counts[-2].total() == BASELINE + COPY + NOTE + LOOK + 1  # a state kept
    assert counts[-1].total() == LAST_LAYERS + NOTE + LOOK + 2  # a line


@pytest.mark.parametrize("cached", [1, 2])
def test_launches_of_a_correction(unet, cached):
    """The last layers once more, however many steps were cached, and a few for each."""
    symbols, counts = run(unet, Recipe(steps=StepCache(cached + 1)), 2 * cached + 3)
    assert symbols == "F" + 2 * ("f" * cached + "F")
    assert counts[-2].total() == LAST_LAYERS + NOTE + LOOK + 4  # a line; the latent and the output cloned
    # One state kept; a parabola, and how the output changes on it; for each cached step its share of that,
    # added, and subtracted. An error of the latent is a term for each error before, and a sum: in the second
    # cached step's output, in the own one, and in what mends it.
    errors = sum(n + 1 for n in range(1, cached)) + 2 * (cached + 1)
    assert counts[-1].total() == BASELINE + COPY + NOTE + LOOK + 1 + LAST_LAYERS + 3 + 1 + 3 * cached + errors
