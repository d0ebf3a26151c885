"""The patch in every kind of pipeline with a U-Net, and in transformers whose self-attention is plain."""

from functools import partial

import diffusers
import pytest
import torch
from callers import inputs
from logs import silent
from pipelines import HOSTS, build_host, cases
from recipes import AGENTS_THEN_KEYS
from tiny import BETAS, WIDTH, make_text_encoder, make_vae, sdxl_parts, sdxl_unet, watch_phases

from agentsd import Agents, Downsample, Phases, Recipe, StepCache, apply_agentsd, remove_agentsd
from agentsd.hosts import frames_of


@pytest.fixture
def build(make_pipeline, tokenizer):
    return partial(build_host, make_pipeline, tokenizer, num_inference_steps=3)


@pytest.mark.parametrize("name", cases(HOSTS))
def test_host(build, name):
    """Both phases run in every patched layer, the image changes, and all of it can be undone."""
    pipe, run = build(name)
    baseline, processors = run(), dict(pipe.unet.attn_processors)
    handle = apply_agentsd(pipe, recipe=AGENTS_THEN_KEYS)
    seen = watch_phases(handle)
    patched = run()
    assert patched.isfinite().all()
    assert not torch.equal(patched, baseline)
    for phases in seen.values():
        assert set(phases) == {"agent", "downsample"}
    assert not any("motion_modules" in layer for layer in handle.layer_names)
    remove_agentsd(pipe)
    assert torch.equal(run(), baseline)
    assert pipe.unet.attn_processors == processors


def test_the_controlnets_own_attention_is_patched_only_when_asked(build):
    pipe, run = build("ControlNet")
    before = dict(pipe.controlnet.attn_processors)
    apply_agentsd(pipe, recipe=AGENTS_THEN_KEYS)
    unet_only = run()
    assert pipe.controlnet.attn_processors == before
    with apply_agentsd(pipe.controlnet, recipe=AGENTS_THEN_KEYS):
        assert not torch.equal(run(), unet_only)
    assert torch.equal(run(), unet_only)


def test_modular_guiders_share_phases_and_have_states_of_their_own(tokenizer):
    """A guider calls once for each pass, of which neither begins a run, nor shares states with the other."""
    blocks = pytest.importorskip("diffusers.modular_pipelines", reason="this diffusers has none")
    guiders = pytest.importorskip("diffusers.guiders")
    pipe = blocks.StableDiffusionXLAutoBlocks().init_pipeline()
    pipe.update_components(
        vae=make_vae(),
        text_encoder=make_text_encoder(tokenizer),
        tokenizer=tokenizer,
        unet=sdxl_unet(),
        scheduler=diffusers.EulerDiscreteScheduler(**BETAS),
        guider=guiders.ClassifierFreeGuidance(guidance_scale=5.0),
        **sdxl_parts(tokenizer),
    )
    pipe.set_progress_bar_config(disable=True)

    def run():
        rng = torch.Generator().manual_seed(0)
        inputs = {"prompt": "a cat", "height": 32, "width": 32, "num_inference_steps": 8}
        return pipe(generator=rng, output="images", output_type="latent", **inputs)

    baseline = run()
    seen = watch_phases(apply_agentsd(pipe, recipe=AGENTS_THEN_KEYS))
    run()
    for phases in seen.values():  # eight steps, three of them early, two branches
        assert phases == ["agent"] * 6 + ["downsample"] * 10
    handle = apply_agentsd(pipe, recipe=Recipe(steps=StepCache(2)))
    cached = run()
    assert handle.summary().split()[0] == "FFff" * 4  # by the pass's text; nothing is there to be halved
    assert (cached - baseline).norm() < 0.3 * baseline.norm()


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
    phases = watch_phases(apply_agentsd(unet, recipe=Recipe(Agents(), levels=3)))
    latent = torch.randn(1, 4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    with silent(), torch.no_grad():  # no layer got other tokens than its level has
        unet(latent, torch.tensor(999), torch.ones(1, 7, WIDTH))
    assert phases
    assert not any("temp_attentions" in name or "transformer_in" in name for name in phases)
    assert all(seen == ["agent"] for name, seen in phases.items() if not name.startswith("mid_block"))


def test_video_latents_with_frames_first():
    """Stable Video Diffusion's are (B, F, C, H, W)."""
    svd = type("Config", (), {"num_frames": 14})
    assert frames_of(svd, torch.empty(2, 14, 8, 4, 4)) == 14
    assert frames_of(diffusers.DDIMScheduler(**BETAS).config, torch.empty(2, 4, 7, 4, 4)) == 7
    assert frames_of(None, torch.empty(2, 4, 4, 4)) == 1


SIZES = {
    "num_attention_heads": 2,
    "attention_head_dim": 8,
    "in_channels": 4,
    "out_channels": 8,
    "num_layers": 2,
    "sample_size": 16,
    "patch_size": 2,
}
DIT = {"num_embeds_ada_norm": 1000}
PIXART = {"cross_attention_dim": 16, "caption_channels": WIDTH, "use_additional_conditions": False}


@pytest.mark.parametrize(
    ("kind", "more", "given"),
    [
        (diffusers.DiTTransformer2DModel, DIT, {"class_labels": torch.tensor([1, 2])}),
        (diffusers.PixArtTransformer2DModel, PIXART, {"encoder_hidden_states": torch.ones(2, 7, WIDTH)}),
    ],
)
def test_transformers_with_plain_self_attention(kind, more, given):
    """Their tokens are patches of 2x2 latent pixels: an 8x8 grid, of which 4 tokens are agents."""
    torch.manual_seed(0)
    model, latent = kind(**SIZES, **more).eval(), inputs()[0]

    @torch.no_grad()
    def run():
        return [model(latent, timestep=torch.tensor([t, t]), **given).sample for t in (999, 1)]

    baseline = run()
    handle = apply_agentsd(model, recipe=Recipe(Phases(Agents(0.2), Downsample())))
    seen = watch_phases(handle)
    assert not any(map(torch.equal, run(), baseline))
    assert list(seen.values()) == [["agent", "downsample"]] * 2
    handle.remove()
    assert all(map(torch.equal, run(), baseline))
