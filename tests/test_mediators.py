"""Pooled agents, and their number by how far the latent moves."""

import torch
from tiny import call, make_unet

from agentsd import PooledAgents, Recipe, apply_agentsd
from agentsd.attention.by_distance import LatentDistance


def latents(*moves):
    """Latents (1, 1, 2, 2) that move by so much on average, one after another."""
    at, seen = torch.zeros(1, 1, 2, 2), []
    for move in (0.0, *moves):
        at = at + move * torch.tensor([[[[0.5, -1.5], [1.5, -0.5]]]])
        seen.append(at)
    return seen


def test_stages_follow_the_distance():
    distance = LatentDistance((0.6, 0.3))
    stages = [distance.read(x, begins=i == 0) for i, x in enumerate(latents(10, 7, 6, 5, 3, 2, 8))]
    # the first call has no distance; 10 is the first; 6 and 3 are at their thresholds
    assert stages == [0, 0, 0, 1, 1, 2, 2, 0]


def test_whose_distance_it_is():
    """Of the run, from its first call; of a batch the mean; guidance that is cut off goes on."""
    a, b, c = latents(10, 1)
    distance = LatentDistance((0.5,))
    assert [distance.read(x, begins=False) for x in (a, b, c)] == [0, 0, 1]
    assert [distance.read(x, begins=x is a) for x in (a, c, b)] == [0, 0, 1]
    assert distance.read(torch.zeros(2, 1, 2, 2), begins=False) == 0  # another batch
    distance, still, moving = LatentDistance((0.5,)), latents(10, 1), latents(10, 9)
    read = [distance.read(torch.cat(pair), begins=False) for pair in zip(still, moving, strict=True)]
    assert read[-1] == 1  # 5 of 10
    distance = LatentDistance((0.5,))
    assert [distance.read(torch.cat([x + 30, x]), begins=False) for x in (a, b)] == [0, 0]
    assert distance.read(c, begins=False) == 1


def test_a_repeated_timestep_stays_in_its_stage():
    """And a latent that the sampler writes into is still the one that was seen."""
    distance, given = LatentDistance((0.5,)), torch.zeros(1, 1, 2, 2)
    a, b, c, d, e = latents(10, 1, 2, 9)
    calls = [(a, False), (b, False), (c, True), (d, False), (e, False)]  # PLMS takes its second step twice
    stages = [distance.read(given.copy_(x), begins=x is a, repeats=repeated) for x, repeated in calls]
    assert stages == [0, 0, 0, 1, 0]


def test_every_token_an_agent_of_pooled_queries():
    """With as many pooled agents as half the tokens or more, attention stays plain, as with merged ones."""
    unet = make_unet()
    baseline = call(unet)
    for count, plain in ((256, True), (128, True), (127, False)):
        with apply_agentsd(unet, recipe=Recipe(PooledAgents(count))):
            assert torch.equal(call(unet), baseline) == plain
