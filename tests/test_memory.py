"""Peak memory of SD 1.5's U-Net, counted from the storages alive: its tensors have shapes and no numbers."""

import torch
from agentsd_eval.cost.architectures import SD15
from diffusers import UNet2DConditionModel
from recipes import AGENTS_THEN_KEYS

from agentsd import apply_agentsd
from agentsd.attention import matching
from agentsd.dreambooth.counting import Storages, fused_attention
from agentsd.recipe import AGENTSD


@torch.no_grad()
def test_the_patch_takes_no_more_memory_than_baseline(monkeypatch):
    """But for the indices of what is merged, about a thousandth; at 2048 px."""
    with Storages("meta") as storages, fused_attention():
        with torch.device("meta"):
            unet = UNet2DConditionModel(**SD15).eval()
            latents, text = torch.empty(2, 4, 256, 256), torch.empty(2, 77, 768)
        held = storages.live

        def peak(t):
            storages.peak = storages.live
            unet(latents, t, encoder_hidden_states=text)
            return storages.peak - held

        baseline = peak(999)
        for recipe in (AGENTSD, AGENTS_THEN_KEYS):
            with apply_agentsd(unet, recipe=recipe):
                assert peak(999) < 1.0015 * baseline
                assert peak(1) < 1.0015 * baseline
        # The score matrix as a whole would be larger than everything else.
        monkeypatch.setattr(matching, "SCORE_BUDGET", 2**60)
        with apply_agentsd(unet, recipe=AGENTSD):
            assert peak(1) > 1.5 * baseline
