"""Counts of work: exact, and growing no faster than they should."""

import math

import pytest
import torch
from diffusers.models.attention_processor import AttnProcessor
from test_patch import call
from tiny import make_unet

from agentsd import apply_agentsd
from agentsd.cost import multiply_adds


def in_first_layer(unet, side, t=999):
    """Multiply-adds of the first self-attention layer in a call on a square latent, matching and all."""
    attn, counts = unet.down_blocks[0].attentions[0].transformer_blocks[0].attn1, []
    forward = attn.forward

    def counted(*args, **kwargs):
        outputs = []
        counts.append(multiply_adds(lambda: outputs.append(forward(*args, **kwargs))))
        return outputs[0]

    attn.forward = counted
    try:
        call(unet, t, size=(side, side), batch=1)
    finally:
        del attn.forward
    return counts[0]


@pytest.mark.parametrize("processor", [None, AttnProcessor()])
def test_attention_is_counted_however_it_is_computed(processor):
    unet = make_unet()
    if processor is not None:
        unet.set_attn_processor(processor)
    tokens, channels = 16 * 16, unet.down_blocks[0].attentions[0].norm.num_channels
    expected = 4 * tokens * channels**2 + 2 * tokens**2 * channels
    assert in_first_layer(unet, 16) == expected


@pytest.mark.parametrize("t", [999, 1], ids=["early", "later"])
def test_fast_mode_grows_with_the_tokens_not_their_square(t):
    """From 4,096 to 65,536 tokens the self-attention grows at most as tokens**1.2."""
    unet = make_unet()
    with apply_agentsd(unet, mode="fast"):
        few, many = (in_first_layer(unet, side, t) for side in (64, 256))
    assert math.log(many / few, 16) < 1.2
    with apply_agentsd(unet, mode="exact"):  # while exact mode has N/16 agents, and merges into N/4 tokens
        assert math.log(in_first_layer(unet, 128, t) / in_first_layer(unet, 64, t), 4) > 1.5


@pytest.mark.parametrize(("mode", "t"), [("exact", 999), ("exact", 1), ("fast", 999), ("fast", 1)])
def test_a_patched_layer_does_less_than_stock(mode, t):
    unet = make_unet()
    stock = in_first_layer(unet, 64, t)
    with apply_agentsd(unet, mode=mode):
        assert in_first_layer(unet, 64, t) < stock
    assert torch.is_tensor(call(unet))
