"""The patch in every kind of pipeline and among every feature that a Stable Diffusion user would try."""

import diffusers
import pytest
import torch
from packaging import version
from PIL import Image
from tiny import (
    BETAS,
    WIDTH,
    make_controlnet,
    make_motion_adapter,
    make_sdxl_unet,
    make_t2i_adapter,
    make_text_encoder,
    make_unet,
    make_vae,
)

from agentsd import apply_agentsd, remove_agentsd

PICTURE = Image.linear_gradient("L").resize((32, 32)).convert("RGB")
MASK = Image.radial_gradient("L").resize((32, 32))
IMAGE = {"image": PICTURE, "strength": 1.0}


def sdxl_unet(**changes):
    """An SDXL U-Net with the extra conditions on text and sizes."""
    return make_sdxl_unet(
        cross_attention_dim=2 * WIDTH,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=6 * 8 + WIDTH,
        **changes,
    )


def sdxl_parts(tokenizer):
    return {"tokenizer_2": tokenizer, "text_encoder_2": make_text_encoder(tokenizer, projection=True)}


HOSTS = {
    "SD 1.x": lambda t: (diffusers.StableDiffusionPipeline, make_unet(), {}, {}),
    "SD 2.x": lambda t: (
        diffusers.StableDiffusionPipeline,
        make_unet(upcast_attention=True, use_linear_projection=True),
        {"scheduler": diffusers.DDIMScheduler(**BETAS, prediction_type="v_prediction")},
        {},
    ),
    "SDXL": lambda t: (diffusers.StableDiffusionXLPipeline, sdxl_unet(), sdxl_parts(t), {}),
    "SDXL img2img": lambda t: (diffusers.StableDiffusionXLImg2ImgPipeline, sdxl_unet(), sdxl_parts(t), IMAGE),
    "SDXL refiner": lambda t: (
        diffusers.StableDiffusionXLImg2ImgPipeline,
        make_sdxl_unet(
            addition_embed_type="text_time",
            addition_time_embed_dim=8,
            projection_class_embeddings_input_dim=5 * 8 + WIDTH,
        ),
        sdxl_parts(t) | {"tokenizer": None, "text_encoder": None, "requires_aesthetics_score": True},
        IMAGE,
    ),
    "img2img": lambda t: (diffusers.StableDiffusionImg2ImgPipeline, make_unet(), {}, IMAGE),
    "inpaint": lambda t: (
        diffusers.StableDiffusionInpaintPipeline,
        make_unet(),
        {},
        IMAGE | {"mask_image": MASK, "height": 32, "width": 32},
    ),
    "inpaint, 9 channels": lambda t: (
        diffusers.StableDiffusionInpaintPipeline,
        make_unet(in_channels=9),
        {},
        IMAGE | {"mask_image": MASK, "height": 32, "width": 32},
    ),
    "depth2img": lambda t: (
        diffusers.StableDiffusionDepth2ImgPipeline,
        make_unet(in_channels=5),
        {"depth_estimator": None, "feature_extractor": None},
        IMAGE | {"depth_map": torch.rand(1, 32, 32, generator=torch.Generator().manual_seed(0))},
    ),
    "ControlNet": lambda t: (
        diffusers.StableDiffusionControlNetPipeline,
        make_unet(),
        {"controlnet": make_controlnet()},
        {"image": PICTURE},
    ),
    "T2I-Adapter": lambda t: (
        diffusers.StableDiffusionAdapterPipeline,
        make_unet(),
        {"adapter": make_t2i_adapter()},
        {"image": PICTURE},
    ),
    "InstructPix2Pix": lambda t: (
        diffusers.StableDiffusionInstructPix2PixPipeline,
        make_unet(in_channels=8),
        {},
        {"image": PICTURE},
    ),
    "LCM": lambda t: (
        diffusers.LatentConsistencyModelPipeline,
        make_unet(time_cond_proj_dim=8),
        {"scheduler": diffusers.LCMScheduler(**BETAS)},
        {"num_inference_steps": 4},
    ),
    "SD Turbo": lambda t: (
        diffusers.StableDiffusionPipeline,
        make_unet(),
        {"scheduler": diffusers.EulerAncestralDiscreteScheduler(**BETAS, timestep_spacing="trailing")},
        {"num_inference_steps": 4, "guidance_scale": 0.0},
    ),
    "AnimateDiff": lambda t: (
        diffusers.AnimateDiffPipeline,
        make_unet(),
        {"motion_adapter": make_motion_adapter(), "feature_extractor": None, "image_encoder": None},
        {"num_frames": 2, "height": 32, "width": 32},
    ),
}


@pytest.fixture
def build(make_pipeline, tokenizer):
    """Build a host: the pipeline, and a function that runs it to its latents."""

    def make(name):
        cls, unet, parts, inputs = HOSTS[name](tokenizer)
        pipe = make_pipeline(unet=unet, cls=cls, **parts)

        def run():
            torch.manual_seed(0)
            settings = {"prompt": "a cat", "num_inference_steps": 6, "output_type": "latent"} | inputs
            return pipe(generator=torch.Generator().manual_seed(0), **settings)[0]

        return pipe, run

    return make


def watch_phases(handle):
    """Which phases each patched layer goes through."""
    seen = {name: [] for name in handle.layer_names}
    for attn, layer in handle._layers:
        attn.register_forward_pre_hook(
            lambda m, args, layer=layer: seen[layer.name].append(layer.group.phase)
        )
    return seen


@pytest.mark.parametrize("name", HOSTS)
def test_host(build, name):
    """Both phases run in every patched layer, the picture changes, and all of it can be undone."""
    pipe, run = build(name)
    stock = run()
    processors = dict(pipe.unet.attn_processors)
    handle = apply_agentsd(pipe)
    seen = watch_phases(handle)
    patched = run()
    assert patched.isfinite().all()
    assert not torch.equal(patched, stock)
    for phases in seen.values():
        assert set(phases) == {"agent", "tome"}
    assert not any("motion_modules" in layer for layer in handle.layer_names)
    assert torch.equal(run(), patched)
    remove_agentsd(pipe)
    assert torch.equal(run(), stock)
    assert {k: id(v) for k, v in pipe.unet.attn_processors.items()} == {
        k: id(v) for k, v in processors.items()
    }


def test_the_controlnets_own_attention_is_patched_only_when_asked(build):
    pipe, run = build("ControlNet")
    stock = run()
    before = dict(pipe.controlnet.attn_processors)
    apply_agentsd(pipe)
    unet_only = run()
    assert {k: id(v) for k, v in pipe.controlnet.attn_processors.items()} == {
        k: id(v) for k, v in before.items()
    }
    handle = apply_agentsd(pipe.controlnet)
    assert not torch.equal(run(), unet_only)
    handle.remove()
    assert torch.equal(run(), unet_only)
    remove_agentsd(pipe)
    assert torch.equal(run(), stock)


def deepcache(pipe):
    from DeepCache import DeepCacheSDHelper

    helper = DeepCacheSDHelper(pipe=pipe)
    helper.set_params(cache_interval=3, cache_branch_id=0)
    helper.enable()
    return helper.disable


@pytest.mark.parametrize("mode", ["exact", "fast"])
@pytest.mark.parametrize("patch_first", [True, False])
def test_deepcache_in_either_order(build, patch_first, mode):
    pipe, run = build("SD 1.x")
    pipe.scheduler = diffusers.DDIMScheduler(**BETAS)  # DeepCache looks timesteps up: they must not repeat
    stock = run()
    disable = deepcache(pipe)
    cached = run()
    apply_agentsd(pipe, mode=mode)
    both = run()
    assert not torch.equal(both, cached)
    disable()
    remove_agentsd(pipe)
    assert torch.equal(run(), stock)

    steps = [lambda: apply_agentsd(pipe, mode=mode).remove, lambda: deepcache(pipe)]
    undo = [step() for step in (steps if patch_first else reversed(steps))]
    assert torch.equal(run(), both)
    for back in undo:
        back()
    assert torch.equal(run(), stock)


def test_tgate_goes_round_processors_and_that_is_said(build):
    pytest.importorskip("tgate", reason="the tgate package is not installed")
    from tgate import TgateSDLoader

    pipe, _ = build("SD 1.x")
    pipe.scheduler = diffusers.DDIMScheduler(**BETAS)
    gated = TgateSDLoader(pipe, gate_step=4, sp_interval=1, fi_interval=1, warm_up=2, num_inference_steps=6)

    def run():
        settings = {"gate_step": 4, "num_inference_steps": 6, "output_type": "latent"}
        return gated.tgate("a cat", generator=torch.Generator().manual_seed(0), **settings).images

    stock = run()
    apply_agentsd(pipe)
    with pytest.warns(UserWarning, match="without its attention processor"):
        assert torch.equal(run(), stock)
    remove_agentsd(pipe)
    assert torch.equal(run(), stock)


def test_saving_a_patched_pipeline_saves_a_stock_one(build, tmp_path):
    pipe, run = build("SD 1.x")
    stock = run()
    apply_agentsd(pipe)
    patched = run()
    pipe.save_pretrained(tmp_path)
    assert "agentsd" not in "".join(p.read_text() for p in tmp_path.rglob("*.json"))
    loaded = diffusers.StableDiffusionPipeline.from_pretrained(tmp_path)
    settings = {"prompt": "a cat", "num_inference_steps": 6, "output_type": "latent"}
    assert torch.equal(loaded(generator=torch.Generator().manual_seed(0), **settings).images, stock)
    apply_agentsd(loaded)
    assert torch.equal(loaded(generator=torch.Generator().manual_seed(0), **settings).images, patched)


def test_pipelines_that_share_a_unet_share_the_patch(build):
    pipe, run = build("SD 1.x")
    stock = run()
    other = diffusers.AutoPipelineForImage2Image.from_pipe(pipe)
    assert other.unet is pipe.unet
    apply_agentsd(pipe)
    assert not torch.equal(run(), stock)
    remove_agentsd(other)
    assert torch.equal(run(), stock)


@pytest.mark.parametrize("patch_first", [True, False])
@pytest.mark.parametrize("offload", ["group", "casting"])
def test_group_offloading_and_layerwise_casting(build, offload, patch_first):
    pipe, run = build("SD 1.x")
    stock = run()
    if patch_first:
        apply_agentsd(pipe)
    if offload == "group":
        if version.parse(diffusers.__version__) < version.parse("0.42") and not torch.cuda.is_available():
            pytest.skip("group offloading before diffusers 0.42 needs an accelerator")
        cpu = torch.device("cpu")
        pipe.unet.enable_group_offload(onload_device=cpu, offload_device=cpu, offload_type="leaf_level")
    else:
        pipe.unet.enable_layerwise_casting(storage_dtype=torch.bfloat16, compute_dtype=torch.float32)
    if not patch_first:
        apply_agentsd(pipe)
    patched = run()
    remove_agentsd(pipe)
    plain = run()
    assert not torch.equal(patched, plain)
    if offload == "group":
        assert torch.equal(plain, stock)
        apply_agentsd(pipe)
        assert torch.equal(run(), patched)


def test_attention_backends_and_moves_after_the_patch(build):
    pipe, run = build("SD 1.x")
    apply_agentsd(pipe)
    patched = run()
    pipe.unet.set_attention_backend("native")
    assert torch.equal(run(), patched)
    assert run().dtype == torch.float32
    pipe.to(torch.bfloat16)
    assert run().dtype == torch.bfloat16


def test_textual_inversion_after_the_patch(build):
    pipe, run = build("SD 1.x")
    apply_agentsd(pipe)
    patched = run()
    pipe.load_textual_inversion({"<cat>": torch.ones(1, WIDTH)}, token="<cat>")
    picture = pipe(
        "<cat>", num_inference_steps=6, output_type="latent", generator=torch.Generator().manual_seed(0)
    )
    assert not torch.equal(picture.images, patched)


def test_upcast_attention_does_not_overflow_in_half_precision():
    """Queries and keys whose products pass 65,504, as SD 2.1's do."""
    unet = make_unet(upcast_attention=True)
    handle = apply_agentsd(unet)
    with torch.no_grad():
        for attn, _ in handle._layers:
            attn.to_q.weight.mul_(600)
            attn.to_k.weight.mul_(600)
    unet.to(torch.float16)
    latent = torch.randn(2, 4, 16, 16, generator=torch.Generator().manual_seed(0)).half()
    with torch.no_grad():
        out = unet(latent, torch.tensor(999), torch.zeros(2, 7, WIDTH).half()).sample
    assert out.isfinite().all()


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

    stock = run(999), run(1)
    handle = apply_agentsd(model, ratio=0.2)
    seen = watch_phases(handle)
    for t, before in zip((999, 1), stock, strict=True):
        assert not torch.equal(run(t), before)
    assert list(seen.values()) == [["agent", "tome"]] * 2
    handle.remove()
    assert torch.equal(run(999), stock[0])


def test_dit_pipeline():
    pipe = diffusers.DiTPipeline(
        transformer=dit(), vae=make_vae(), scheduler=diffusers.DDIMScheduler(**BETAS), id2label={"1": "cat"}
    )
    pipe.set_progress_bar_config(disable=True)

    def run():
        return pipe(
            [1], num_inference_steps=5, output_type="np", generator=torch.Generator().manual_seed(0)
        ).images

    stock = run()
    with apply_agentsd(pipe, ratio=0.2):
        assert abs(run() - stock).max() > 0
    assert (run() == stock).all()


def test_a_transformer_of_another_kind_is_refused():
    model = diffusers.SD3Transformer2DModel(
        sample_size=16, patch_size=2, in_channels=4, num_layers=1, attention_head_dim=8,
        num_attention_heads=2, joint_attention_dim=8, caption_projection_dim=16,
        pooled_projection_dim=8, out_channels=4,
    )  # fmt: skip
    with pytest.raises(ValueError, match="SD3Transformer2DModel has no self-attention"):
        apply_agentsd(model)


def test_modular_sdxl_calls_the_unet_once_for_each_guidance_branch(tokenizer):
    modular = pytest.importorskip(
        "diffusers.modular_pipelines", reason="this diffusers has no modular pipelines"
    )
    from diffusers.guiders import ClassifierFreeGuidance

    pipe = modular.StableDiffusionXLAutoBlocks().init_pipeline()
    pipe.update_components(
        vae=make_vae(),
        text_encoder=make_text_encoder(tokenizer),
        tokenizer=tokenizer,
        unet=sdxl_unet(),
        scheduler=diffusers.EulerDiscreteScheduler(**BETAS),
        guider=ClassifierFreeGuidance(guidance_scale=5.0),
        **sdxl_parts(tokenizer),
    )
    pipe.set_progress_bar_config(disable=True)

    def run():
        rng = torch.Generator().manual_seed(0)
        inputs = {"prompt": "a cat", "height": 32, "width": 32, "num_inference_steps": 5}
        return pipe(generator=rng, output="images", output_type="latent", **inputs)

    stock = run()
    handle = apply_agentsd(pipe, cells="random")
    seen = watch_phases(handle)
    patched = run()
    assert not torch.equal(patched, stock)
    for phases in seen.values():  # five steps, two of them early, two branches
        assert phases == ["agent"] * 4 + ["tome"] * 6
    assert torch.equal(run(), patched)
    remove_agentsd(pipe)
    assert torch.equal(run(), stock)


@pytest.mark.parametrize("patch_first", [True, False])
@pytest.mark.parametrize("kind", ["model", "sequential"])
def test_accelerates_offloading_hooks(build, kind, patch_first):
    """What enable_model_cpu_offload and enable_sequential_cpu_offload put on a U-Net, run on the CPU."""
    import accelerate

    pipe, run = build("SD 1.x")
    stock = run()
    if patch_first:
        apply_agentsd(pipe)
    if kind == "model":
        pipe.unet, _ = accelerate.cpu_offload_with_hook(pipe.unet, execution_device="cpu")
    else:
        accelerate.cpu_offload(pipe.unet, execution_device=torch.device("cpu"))
    if not patch_first:
        apply_agentsd(pipe)
    patched = run()
    assert not torch.equal(patched, stock)
    remove_agentsd(pipe)
    assert torch.equal(run(), stock)
    with apply_agentsd(pipe):
        assert torch.equal(run(), patched)


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

    stock = outputs()
    cross = {n: p for n, p in unet.attn_processors.items() if "attn2" in n}
    handle = apply_agentsd(unet)
    handle._layers[0][1].group.begin(torch.empty(2, 4, 16, 16), 999.0, (0, 0))
    assert all(torch.equal(a, b) for a, b in zip(outputs(), stock, strict=True))
    assert {n: p for n, p in unet.attn_processors.items() if "attn2" in n} == cross
