"""The patch in every kind of pipeline and among every feature that a Stable Diffusion user would try."""

import diffusers
import pytest
import torch
from PIL import Image
from tiny import (
    BETAS,
    WIDTH,
    make_controlnet,
    make_image_encoder,
    make_image_processor,
    make_motion_adapter,
    make_sdxl_unet,
    make_t2i_adapter,
    make_text_encoder,
    make_unet,
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
        attn.register_forward_pre_hook(lambda m, args, layer=layer: seen[layer.name].append(layer.phase))
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
    assert {k: id(v) for k, v in pipe.unet.attn_processors.items()} == {k: id(v) for k, v in processors.items()}
