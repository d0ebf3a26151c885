"""Later steps in which all tokens attend to a quarter of them (ToDo)."""

import pytest
import torch
from callers import inputs
from diffusers.models.attention_processor import AttnProcessor2_0
from recipes import AGENTS_THEN_KEYS, TODO
from tiny import call, make_unet

from agentsd import Downsample, Recipe, apply_agentsd
from agentsd.attention import downsample


@pytest.mark.parametrize("size", [(16, 16), (17, 9)])
def test_a_layer_is_diffusers_own_attention_to_the_first_token_of_each_cell(size):
    """Diffusers' processor gets those tokens as if they were another sequence."""
    unet = make_unet()
    attn = unet.down_blocks[0].attentions[0].transformer_blocks[0].attn1
    seen = {}
    attn.register_forward_hook(lambda m, args, out: seen.update(x=args[0], out=out))
    with apply_agentsd(unet, recipe=AGENTS_THEN_KEYS):
        call(unet, t=1, size=size)
    height, width = (side // 2 * 2 for side in size)
    kept = seen["x"].unflatten(1, size)[:, :height:2, :width:2].flatten(1, 2)
    with torch.no_grad():
        expected = AttnProcessor2_0()(attn, seen["x"], kept)
    assert torch.equal(seen["out"], expected)


@pytest.mark.parametrize(
    ("settings", "size", "kept"),
    [
        ({"at_most": 36}, (12, 12), [36, 9]),
        ({"at_most": 36}, (24, 24), [36, 16]),
        ({"at_most": 36}, (8, 32), [20, 16]),
        ({"at_most": None}, (16, 16), [64, 16]),
        ({"stride": 4}, (3, 3), [9, 4]),  # no cell is whole
    ],
)
def test_keys_are_bounded(settings, size, kept):
    """Cells grow where 2 x 2 would leave more than 36 keys, or 18 at the second level."""
    unet = make_unet()
    seen = []
    for block in unet.down_blocks[:2]:
        attn = block.attentions[0].transformer_blocks[0].attn1
        attn.to_k.register_forward_hook(lambda m, args, out: seen.append(out.shape[1]))
    with apply_agentsd(unet, recipe=Recipe(Downsample(**settings))):
        call(unet, t=1, size=size)
    assert seen == kept


def test_a_call_in_inference_mode_does_not_spoil_training():
    """What is kept from call to call must be usable in a backward."""
    grads, (latent, text) = [], inputs()
    for before in (torch.no_grad, torch.inference_mode):
        apply_agentsd(unet := make_unet(), recipe=TODO)
        downsample._first_of_cells.cache_clear()
        with before():
            unet(latent, torch.tensor(1), text)
        unet(latent, torch.tensor(1), text).sample.square().mean().backward()
        grads.append(unet.down_blocks[0].attentions[0].transformer_blocks[0].attn1.to_k.weight.grad)
    assert grads[0].abs().sum() > 0
    assert torch.equal(*grads)
