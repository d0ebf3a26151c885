"""The patch in every kind of pipeline with a U-Net, and in transformers whose self-attention is plain."""

from functools import partial

import diffusers
import pytest
import torch
from logs import silent
from pipelines import HOSTS, build_host, cases
from recipes import AGENTS_THEN_KEYS
from tiny import BETAS, WIDTH, make_text_encoder, make_unet, make_vae, sdxl_parts, sdxl_unet, watch_phases

from agentsd import Agents, Downsample, Phases, Recipe, StepCache, apply_agentsd, remove_agentsd
from agentsd.hosts import frames_of
from agentsd.plan import Call
from agentsd.recipe import AGENTSD


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
    baseline = run()
    before = dict(pipe.controlnet.attn_processors)
    apply_agentsd(pipe, recipe=AGENTS_THEN_KEYS)
    unet_only = run()
    assert pipe.controlnet.attn_processors == before
    handle = apply_agentsd(pipe.controlnet, recipe=AGENTS_THEN_KEYS)
    assert not torch.equal(run(), unet_only)
    handle.remove()
    assert torch.equal(run(), unet_only)
    remove_agentsd(pipe)
    assert torch.equal(run(), baseline)


def test_textual_inversion_after_the_patch(make_pipeline, sample):
    """The word means the same whether it was taught before or after the patch."""
    concept = {"<cat>": torch.ones(1, WIDTH)}
    before, after = make_pipeline(), make_pipeline()
    before.load_textual_inversion(concept, token="<cat>")
    apply_agentsd(before, recipe=AGENTS_THEN_KEYS)
    apply_agentsd(after, recipe=AGENTS_THEN_KEYS)
    untaught = sample(after, prompt="<cat>")
    after.load_textual_inversion(concept, token="<cat>")
    assert torch.equal(sample(after, prompt="<cat>"), sample(before, prompt="<cat>"))
    assert not torch.equal(sample(after, prompt="<cat>"), untaught)


@pytest.mark.parametrize(("recipe", "timestep"), [(AGENTSD, 999), (AGENTS_THEN_KEYS, 1)])
def test_upcast_attention_does_not_overflow_in_half_precision(recipe, timestep):
    """Queries and keys whose products pass 65,504, as SD 2.1's do."""
    unet = make_unet(upcast_attention=True)
    handle = apply_agentsd(unet, recipe=recipe)
    with torch.no_grad():
        for one in handle._layers.processors:
            one.layer.attn.to_q.weight.mul_(600)
            one.layer.attn.to_k.weight.mul_(600)
    unet.to(torch.float16)
    latent = torch.randn(2, 4, 16, 16, generator=torch.Generator().manual_seed(0)).half()
    with torch.no_grad():
        out = unet(latent, torch.tensor(timestep), torch.zeros(2, 7, WIDTH).half()).sample
    assert out.isfinite().all()


@pytest.fixture
def modular(tokenizer):
    """A modular pipeline of SDXL, and a function that runs it: a guider calls once for each pass."""
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

    return pipe, run


def test_modular_guiders_share_phases_and_have_states_of_their_own(modular):
    pipe, run = modular
    baseline = run()
    handle = apply_agentsd(pipe, recipe=Recipe(Phases(Agents(destinations="random"), Downsample())))
    seen = watch_phases(handle)
    patched = run()
    assert not torch.equal(patched, baseline)
    for phases in seen.values():  # eight steps, three of them early, two branches
        assert phases == ["agent"] * 6 + ["downsample"] * 10
    handle = apply_agentsd(pipe, recipe=Recipe(steps=StepCache(2)))
    cached = run()
    assert handle.summary().split()[0] == "FFff" * 4  # by the pass's text; nothing is there to be halved
    assert (cached - baseline).norm() < 0.3 * baseline.norm()
    remove_agentsd(pipe)
    assert torch.equal(run(), baseline)


def test_masks_and_cross_attention_are_untouched():
    unet = make_unet()
    rng = torch.Generator().manual_seed(0)
    attn = unet.down_blocks[0].attentions[0].transformer_blocks[0].attn1
    tokens = torch.randn(2, 256, 16, generator=rng)
    mask = torch.zeros(2, 1, 256).masked_fill(torch.rand(2, 1, 256, generator=rng) < 0.5, -10000.0)
    other = torch.randn(2, 9, 16, generator=rng)

    def outputs():
        with torch.no_grad():
            return attn(tokens, attention_mask=mask), attn(tokens, encoder_hidden_states=other)

    baseline = outputs()
    cross = {n: p for n, p in unet.attn_processors.items() if "attn2" in n}
    handle = apply_agentsd(unet, recipe=AGENTS_THEN_KEYS)
    handle._layers.begin(Call(torch.empty(2, 4, 16, 16), 999.0, 0), None)
    assert handle._layers.processors[0].group.plan is not None
    assert all(torch.equal(a, b) for a, b in zip(outputs(), baseline, strict=True))
    assert {n: p for n, p in unet.attn_processors.items() if "attn2" in n} == cross


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
    with silent():  # no layer got other tokens than its level has
        patched = run()
    assert not torch.equal(patched, baseline)
    assert all(seen == ["agent"] for name, seen in phases.items() if not name.startswith("mid_block"))
    handle.remove()
    assert torch.equal(run(), baseline)


def test_video_latents_with_frames_first():
    """Stable Video Diffusion's are (B, F, C, H, W)."""

    class Config:
        num_frames = 14

    assert frames_of(Config(), torch.empty(2, 14, 8, 4, 4)) == 14
    assert frames_of(diffusers.DDIMScheduler(**BETAS).config, torch.empty(2, 4, 7, 4, 4)) == 7
    assert frames_of(None, torch.empty(2, 4, 4, 4)) == 1


def dit():
    torch.manual_seed(0)
    return diffusers.DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, out_channels=8, num_layers=2,
        sample_size=16, patch_size=2, num_embeds_ada_norm=1000,
    ).eval()  # fmt: skip


def pixart():
    torch.manual_seed(0)
    return diffusers.PixArtTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, out_channels=8, num_layers=2,
        sample_size=16, patch_size=2, cross_attention_dim=16, caption_channels=WIDTH,
        use_additional_conditions=False,
    ).eval()  # fmt: skip


@pytest.mark.parametrize(
    ("make", "inputs"),
    [
        (dit, {"class_labels": torch.tensor([1, 2])}),
        (pixart, {"encoder_hidden_states": torch.ones(2, 7, WIDTH)}),
    ],
)
def test_transformers_with_plain_self_attention(make, inputs):
    """Their tokens are patches of 2x2 latent pixels: an 8x8 grid, of which 4 tokens are agents."""
    model = make()
    latent = torch.randn(2, 4, 16, 16, generator=torch.Generator().manual_seed(0))

    def run(t):
        with torch.no_grad():
            return model(latent, timestep=torch.tensor([t, t]), **inputs).sample

    baseline = run(999), run(1)
    handle = apply_agentsd(model, recipe=AGENTS_THEN_KEYS.with_settings(ratio=0.2))
    seen = watch_phases(handle)
    for t, before in zip((999, 1), baseline, strict=True):
        assert not torch.equal(run(t), before)
    assert list(seen.values()) == [["agent", "downsample"]] * 2
    handle.remove()
    assert torch.equal(run(999), baseline[0])


def test_transformers_of_other_kinds_are_refused():
    """One whose attention joins the text, and one that has no image to merge tokens of."""
    sd3 = diffusers.SD3Transformer2DModel(
        sample_size=16, patch_size=2, in_channels=4, num_layers=1, attention_head_dim=8,
        num_attention_heads=2, joint_attention_dim=8, caption_projection_dim=16,
        pooled_projection_dim=8, out_channels=4,
    )  # fmt: skip
    prior = diffusers.PriorTransformer(
        num_attention_heads=2, attention_head_dim=8, num_layers=1, embedding_dim=16
    )
    for model in (sd3, prior):
        with pytest.raises(ValueError, match=rf"{type(model).__name__} has no self-attention that agentsd"):
            apply_agentsd(model, recipe=AGENTS_THEN_KEYS)
