"""Faults that were found and mended, each a test that the old code fails: videos."""

import diffusers
import torch
from logs import silent
from tiny import BETAS, WIDTH, make_motion_adapter, make_unet, watch_phases

from agentsd import Agents, ByDistance, PooledAgents, Recipe, apply_agentsd


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


def test_videos_are_in_stages_of_their_own():
    """Each video of a batch gets what it gets alone, though its frames are images to the layers."""
    unet = diffusers.UNetMotionModel.from_unet2d(make_unet(), make_motion_adapter()).eval()
    rng = torch.Generator().manual_seed(0)
    start, step = (torch.randn(2, 4, 3, 16, 16, generator=rng) for _ in range(2))
    moves = torch.tensor([[10.0, 1], [10, 9]]).view(2, 2, 1, 1, 1, 1)  # of each video
    latents = [start, start + moves[:, 0] * step, start + moves.sum(1) * step]
    text = torch.randn(2, 7, WIDTH, generator=rng).repeat_interleave(3, 0)  # of each frame
    few, many = PooledAgents(4), PooledAgents(16)

    def last(recipe, videos=slice(0, 2), first=0):
        texts = text[3 * videos.start : 3 * videos.stop]
        with apply_agentsd(unet, recipe=recipe), torch.no_grad():
            for i in range(first, 3):
                out = unet(latents[i][videos], torch.tensor(900 - 10 * i), texts).sample
        return out

    together = last(Recipe(ByDistance((few, many), (0.5,), "sample")))
    for video, count in enumerate((many, few)):
        alone = last(Recipe(count), slice(video, video + 1), first=2)
        torch.testing.assert_close(together[video : video + 1], alone, rtol=0, atol=1e-4)
    assert not torch.allclose(together, last(Recipe(ByDistance((few, many), (0.5,)))), atol=1e-4)


def test_animatediff_in_stages_of_each_sample(make_pipeline):
    pipe = make_pipeline(
        cls=diffusers.AnimateDiffPipeline,
        scheduler=diffusers.DDPMScheduler(**BETAS, clip_sample=False),
        motion_adapter=make_motion_adapter(),
        feature_extractor=None,
        image_encoder=None,
    )
    stages = [PooledAgents(n) for n in range(4, 25)]
    thresholds = [0.9 - i / 100 for i in range(20)]
    handle = apply_agentsd(pipe, recipe=Recipe(ByDistance(stages, thresholds, "sample")))
    masked = []
    handle._layers.attention_layers[0].attn.register_forward_pre_hook(
        lambda m, args: masked.append(handle._layers.states[0].work.plan.pool.mask is not None)
    )
    settings = {"num_frames": 2, "height": 32, "width": 32, "num_inference_steps": 10}
    rng = torch.Generator().manual_seed(0)
    frames = pipe(["a cat", "a dog"], output_type="latent", generator=rng, **settings).frames
    assert frames.isfinite().all()
    assert any(masked)  # samples differed
