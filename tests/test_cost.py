"""Counts of work: exact, and growing no faster than they should."""

import math

import pytest
from agentsd_eval.cost.macs import macs
from recipes import AGENTS_THEN_KEYS
from tiny import call, make_unet

from agentsd import Agents, Downsample, Merge, Recipe, apply_agentsd


def in_first_layer(unet, side, t=999):
    """MACs of the first self-attention layer in a call on a square latent, matching and all."""
    attn, counts = unet.down_blocks[0].attentions[0].transformer_blocks[0].attn1, []
    forward = attn.forward

    def counted(*args, **kwargs):
        outputs = []
        counts.append(macs(lambda: outputs.append(forward(*args, **kwargs))))
        return outputs[0]

    attn.forward = counted
    try:
        call(unet, t, size=(side, side), batch=1)
    finally:
        del attn.forward
    return counts[0]


@pytest.mark.parametrize("t", [999, 1], ids=["early", "later"])
def test_work_grows_with_the_tokens_not_their_square(t):
    """From 4,096 to 65,536 tokens the self-attention grows at most as tokens**1.2."""
    unet = make_unet()
    with apply_agentsd(unet, recipe=AGENTS_THEN_KEYS):
        few, many = (in_first_layer(unet, side, t) for side in (64, 256))
    assert math.log(many / few, 16) < 1.2
    with apply_agentsd(unet, mode="agentsd"):  # while mode paper has N/16 agents, and merges into N/4 tokens
        assert math.log(in_first_layer(unet, 128, t) / in_first_layer(unet, 64, t), 4) > 1.5


@pytest.mark.parametrize("kind", [Agents, Merge, Downsample])
def test_an_operators_work_is_that_of_its_products(kind):
    """On 32 x 32 tokens: N of all, M after merging 40 % of them, n agents (4 x 4 cells) or keys (2 x 2)."""
    unet = make_unet()
    channels = unet.down_blocks[0].attentions[0].norm.num_channels
    tokens, merged, agents, cells = 1024, 1024 - 409, 64, 256
    # a projection, attention's two products, and the ranking's similarities of sources and destinations
    expected = {
        Agents: (4 * merged + agents) * channels**2
        + 4 * merged * agents * channels
        + (tokens - agents) * agents * channels,
        Merge: 4 * merged * channels**2 + 2 * merged**2 * channels + (tokens - cells) * cells * channels,
        Downsample: 2 * (tokens + cells) * channels**2 + 2 * tokens * cells * channels,
    }
    with apply_agentsd(unet, recipe=Recipe(kind())):
        assert in_first_layer(unet, 32) == expected[kind]
