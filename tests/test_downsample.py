"""Later steps in which all tokens attend to a quarter of them (ToDo)."""

import pytest
import torch
from diffusers.models.attention_processor import AttnProcessor2_0
from recipes import AGENTS_THEN_KEYS
from tiny import call, make_unet

from agentsd import Agents, Downsample, Phases, Recipe, apply_agentsd
from agentsd.attention import downsample

UNBOUNDED = Recipe(Phases(Agents(), Downsample(at_most=None)), levels=1)


@pytest.mark.parametrize("size", [(16, 16), (17, 9)])
@pytest.mark.parametrize("recipe", [UNBOUNDED, AGENTS_THEN_KEYS])
def test_a_layer_is_diffusers_own_attention_to_the_first_token_of_each_cell(size, recipe):
    """Diffusers' processor gets those tokens as if they were another sequence."""
    unet = make_unet()
    attn = unet.down_blocks[0].attentions[0].transformer_blocks[0].attn1
    handle = apply_agentsd(unet, recipe=recipe)
    seen = {}
    attn.register_forward_hook(lambda m, args, out: seen.update(x=args[0], out=out))
    call(unet, t=1, size=size)
    handle.remove()
    height, width = (side // 2 * 2 for side in size)
    kept = seen["x"].unflatten(1, size)[:, :height:2, :width:2].flatten(1, 2)
    with torch.no_grad():
        expected = AttnProcessor2_0()(attn, seen["x"], kept)
    assert torch.equal(seen["out"], expected)


@pytest.mark.parametrize(
    ("at_most", "size", "kept"),
    [
        (36, (12, 12), [36, 9]),
        (36, (16, 16), [25, 16]),
        (36, (8, 32), [20, 16]),
        (None, (16, 16), [64, 16]),
    ],
)
def test_keys_are_bounded(at_most, size, kept):
    """Cells grow where 2 x 2 would leave more than 36 keys, or 18 at the second level."""
    unet = make_unet()
    seen = []
    for block in unet.down_blocks[:2]:
        attn = block.attentions[0].transformer_blocks[0].attn1
        attn.to_k.register_forward_hook(lambda m, args, out: seen.append(out.shape[1]))
    with apply_agentsd(unet, recipe=Recipe(Downsample(at_most=at_most))):
        call(unet, t=1, size=size)
    assert seen == kept


def test_a_grid_without_a_whole_cell_is_left_alone():
    unet = make_unet()
    baseline = call(unet, t=1, size=(3, 3))
    with apply_agentsd(unet, recipe=Recipe(Downsample(stride=4))):
        assert torch.equal(call(unet, t=1, size=(3, 3)), baseline)
        larger = call(unet, t=1)
    assert not torch.equal(larger, call(unet, t=1))


def test_a_call_in_inference_mode_does_not_spoil_training():
    """What is kept from call to call must be usable in a backward."""
    grads = []
    for before in (torch.no_grad, torch.inference_mode):
        unet = make_unet()
        apply_agentsd(unet, recipe=Recipe(Downsample()))
        rng = torch.Generator().manual_seed(0)
        latent, text = torch.randn(1, 4, 22, 22, generator=rng), torch.randn(1, 7, 16, generator=rng)
        downsample._first_of_cells.cache_clear()
        with before():
            unet(latent, torch.tensor(1), text)
        unet(latent, torch.tensor(1), text).sample.square().mean().backward()
        grads.append(unet.down_blocks[0].attentions[0].transformer_blocks[0].attn1.to_k.weight.grad)
    assert grads[0].abs().sum() > 0
    assert torch.equal(*grads)
