"""Faults that were found and mended, each a test that the old code fails: videos."""

import diffusers
import torch
from logs import silent
from tiny import WIDTH, watch_phases

from agentsd import Agents, Recipe, apply_agentsd


def test_attention_over_time_is_left_alone():
    torch.manual_seed(0)
    unet = diffusers.UNet3DConditionModel(
        sample_size=16,
        block_out_channels=(16, 32, 32),
        down_block_types=("CrossAttnDownBlock3D", "CrossAttnDownBlock3D", "DownBlock3D"),
        up_block_types=("UpBlock3D", "CrossAttnUpBlock3D", "CrossAttnUpBlock3D"),
        layers_per_block=1,
        cross_attention_dim=WIDTH,
        attention_head_dim=8,
        norm_num_groups=4,
    ).eval()
    latent = torch.randn(1, 4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    text = torch.ones(1, 7, WIDTH)

    def run():
        with torch.no_grad():
            return unet(latent, torch.tensor(999), text).sample

    baseline = run()
    handle = apply_agentsd(unet, recipe=Recipe(Agents(), levels=3))
    phases = watch_phases(handle)
    assert handle.layer_names
    assert not any("temp_attentions" in name or "transformer_in" in name for name in handle.layer_names)
    temporal = [n for n, m in unet.named_modules() if "temp_attentions" in n and hasattr(m, "_agentsd")]
    assert not temporal
    with silent():  # no layer got other tokens than its level has
        patched = run()
    assert patched.isfinite().all()
    assert not torch.equal(patched, baseline)
    assert all(seen == ["agent"] for name, seen in phases.items() if not name.startswith("mid_block"))
    handle.remove()
    assert torch.equal(run(), baseline)
