"""What a GPU's user changes in a U-Net: its memory format, and the function or the processor of attention."""

import pytest
import torch
import torch.nn.functional as F
from callers import Guided
from diffusers.models.attention_processor import AttnProcessor2_0
from tiny import call, make_unet, may_skip

from agentsd import Agents, Downsample, Merge, Recipe, ResidualSharing, StepCache, apply_agentsd

CACHED = Recipe(Merge(), residual=ResidualSharing(2, warmup_steps=1), steps=StepCache(2))


def test_channels_last_gives_the_same_images_and_stays_so():
    images, caller, entered = [], Guided(9), []
    for memory_format in (torch.contiguous_format, torch.channels_last):
        unet = make_unet().to(memory_format=memory_format)
        apply_agentsd(unet, recipe=CACHED)
        images.append([caller(unet, i) for i in range(8)])
        unet.up_blocks[-1].resnets[-1].register_forward_pre_hook(
            may_skip(lambda module, args: entered.append(args[0]))
        )
        images[-1].append(caller(unet, 8))
    torch.testing.assert_close(*images, rtol=0, atol=1e-4)
    contiguous, channels_last = entered[: len(entered) // 2], entered[len(entered) // 2 :]
    assert len(channels_last) == len(contiguous) > 0
    assert all(state.is_contiguous(memory_format=torch.channels_last) for state in channels_last)


@pytest.mark.parametrize(("operator", "replaced"), [(Agents(), False), (Downsample(), True)])
def test_attention_in_place_of_torchs(monkeypatch, operator, replaced):
    """SageAttention's has no `scale`: the two softmaxes of agents, which need one, stay torch's own."""
    unet, calls, torchs = make_unet(), [], F.scaled_dot_product_attention

    def sage(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False):
        calls.append(query)
        return torchs(query, key, value, attn_mask, dropout_p, is_causal)

    monkeypatch.setattr(F, "scaled_dot_product_attention", sage)
    baseline = call(unet)
    everywhere = len(calls)
    calls.clear()
    handle = apply_agentsd(unet, recipe=Recipe(operator, levels=1))
    patched = call(unet)
    assert len(calls) == everywhere - (0 if replaced else len(handle.layer_names))
    monkeypatch.undo()
    assert torch.equal(call(unet), patched)
    assert not torch.equal(patched, baseline)


def test_xformers_processor_gets_the_merged_tokens():
    """A stand-in for diffusers' processor of that name, which needs the package to be made."""
    tokens = []

    class XFormersAttnProcessor(AttnProcessor2_0):
        def __call__(self, attn, hidden_states, *args, **kwargs):
            tokens.append(hidden_states.shape[1])
            return super().__call__(attn, hidden_states, *args, **kwargs)

    unet, plain = make_unet(), make_unet()
    for model in (unet, plain):
        apply_agentsd(model, recipe=Recipe(Merge(0.5), levels=1))
    unet.down_blocks[0].attentions[0].transformer_blocks[0].attn1.set_processor(XFormersAttnProcessor())
    assert torch.equal(call(unet), call(plain))
    assert tokens == [128]  # of 256
