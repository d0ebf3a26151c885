"""What a guided call of SD 1.5's structure asks of the device, beside the baseline: counted, not timed."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from diffusers import DDIMScheduler, UNet2DConditionModel
from launches import Launches
from recipes import AGENTS_CACHED, AGENTS_THEN_KEYS, STEP_CACHING

from agentsd import Agents, Downsample, Recipe, ResidualSharing, apply_agentsd

TIMESTEPS = torch.linspace(999, 0, 20)
EARLY, LATE = 0, 15


@pytest.fixture(scope="module")
def unet() -> UNet2DConditionModel:
    """SD 1.5's U-Net, narrow."""
    torch.manual_seed(0)
    widths = {"block_out_channels": (32, 64, 128, 128), "cross_attention_dim": 32, "norm_num_groups": 8}
    return UNet2DConditionModel(sample_size=64, **widths).eval()


@pytest.fixture(scope="module")
def baseline(unet: UNet2DConditionModel) -> Counter[str]:
    """Of a call without agentsd."""
    return launches(unet, EARLY)


@torch.no_grad()
def launches(unet: Any, place: int) -> Counter[str]:
    """Of a guided call at 256 px: as many as at any other size."""
    latent, text = torch.randn(2, 4, 32, 32), torch.randn(2, 77, 32)
    with Launches() as mode:
        unet(latent, TIMESTEPS[place], text)
    return mode.counts


def added(unet: Any, baseline: Counter[str], place: int) -> dict[str, int]:
    """What agents, or later keys, add to the baseline's or take from it, in the second call of a kind."""
    with apply_agentsd(unet, recipe=AGENTS_THEN_KEYS):
        launches(unet, place)
        patched = launches(unet, place)
    differences = {name: patched[name] - baseline[name] for name in patched | baseline}
    return {name: count for name, count in differences.items() if count}


def test_baseline_is_what_it_was(baseline):
    assert baseline.total() == 726


def test_later_steps_with_fewer_keys_add_one_launch_a_layer(unet, baseline):
    """Ten layers pick their keys; that and the timestep's own copy is all."""
    assert added(unet, baseline, LATE) == {"index_select": 10}


def test_early_steps_with_agents_are_counted_op_by_op(unet, baseline):
    layers, levels = 10, 2  # two levels, each ranked once, with a map for tokens and one for agents
    each_layer = {
        "_embedding_bag_forward_only": 1,  # tokens and agents are merged
        "_scaled_dot_product_flash_attention_for_cpu": 1,  # gather beside broadcast
        "add": 1,  # + kV
        "index_select": 1,  # unmerge
        "div": -1,  # baseline divides by a rescale factor of 1
    }
    each_ranking = {
        "index_select": 1,  # the tokens in that order
        "linalg_vector_norm": 1,
        "clamp_min": 1,  # no token has norm 0
        "div": 2,  # destinations by their norms, and the best similarities by the sources'
        "bmm": 1,  # similarities
        "max": 1,  # the best
        "sort": 1,
    }
    each_map = {
        "arange": 1,  # rows of merged tokens, or of agents
        "gather": 1,  # the destination that each source joins
        "scatter_": 2,  # sources and destinations in the tokens' order
        "sort": 1,  # the members of a row side by side
        "searchsorted": 1,  # where they begin and end
        "sub": 1,  # how many there are; from here on in float32 alone
        "_to_copy": 1,
        "reciprocal": 1,
        "index_select": 1,  # the weight of each
    }
    each_pair_of_maps = {"scatter_": 1, "cat": 3, "add": 1}  # sources that stay; both maps as one
    expected: Counter[str] = Counter()
    for counts, times in (
        (each_layer, layers),
        (each_ranking, levels),
        (each_map, 2 * levels),
        (each_pair_of_maps, levels),
    ):
        expected.update({name: count * times for name, count in counts.items()})
    assert added(unet, baseline, EARLY) == expected
    assert expected.total() == 96


@pytest.mark.parametrize(("operator", "each_layer"), [(Downsample(4), 2), (Agents(), 4)])
def test_between_two_residuals_nothing_is_ranked(unet, baseline, operator, each_layer):
    """Ten layers add 20 or 40 launches to 726, for keys or agents and the sum; the residuals' line is two."""
    latent, text = torch.randn(2, 4, 32, 32), torch.randn(2, 77, 32)
    scheduler = DDIMScheduler()
    scheduler.set_timesteps(20)
    with (
        torch.no_grad(),
        apply_agentsd(unet, recipe=Recipe(operator, residual=ResidualSharing(least_tokens=0))),
    ):
        for t in scheduler.timesteps[:5]:
            with Launches() as mode:
                unet(latent, t, text)
    more = {name: mode.counts[name] - baseline[name] for name in mode.counts | baseline}
    assert sum(more.values()) == 10 * each_layer + 3  # the line; a timestep that is an integer is copied
    assert (more["_foreach_mul"], more["_foreach_add_"]) == (1, 1)
    assert not more.get("sort")


def test_cached_agents_add_six_launches_to_a_cached_step(unet):
    """Merge, gather, + kV, unmerge, the residual and its line, less a division: beside step caching alone."""
    sharing = replace(AGENTS_CACHED, residual=replace(AGENTS_CACHED.residual, least_tokens=0))
    calls = []
    for recipe in (STEP_CACHING, sharing):
        rng, scheduler, counts = torch.Generator().manual_seed(0), DDIMScheduler(), []
        scheduler.set_timesteps(20)
        text = torch.randn(2, 77, 32, generator=rng)
        with torch.no_grad(), apply_agentsd(unet, recipe=recipe):
            for t in scheduler.timesteps:
                latent = torch.randn(1, 4, 32, 32, generator=rng).repeat(2, 1, 1, 1)
                with Launches() as mode:
                    unet(latent, t, text)
                counts.append(mode.counts.total())
        calls.append(counts)
    added = [more - less for less, more in zip(*calls, strict=True)]
    assert added[3] == 6  # the first cached step; it has 62 launches, a guided call of the baseline 726
    assert sum(added) < 0.025 * sum(calls[0])
