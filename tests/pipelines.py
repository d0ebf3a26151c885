"""Every kind of pipeline that the suites run, and the features of the host that change its processors."""

from collections.abc import Callable
from dataclasses import dataclass

import diffusers
import torch
from diffusers.models.attention_processor import AttnProcessor, AttnProcessor2_0
from diffusers.pipelines.stable_diffusion.stable_unclip_image_normalizer import StableUnCLIPImageNormalizer
from peft import LoraConfig
from PIL import Image
from tiny import (
    BETAS,
    INPUT_IMAGE,
    WIDTH,
    make_controlnet,
    make_image_encoder,
    make_image_processor,
    make_motion_adapter,
    make_sdxl_unet,
    make_t2i_adapter,
    make_unet,
    sdxl_parts,
    sdxl_unet,
)

MASK = Image.radial_gradient("L").resize((32, 32))


IMAGE = {"image": INPUT_IMAGE, "strength": 1.0}


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
        {"image": INPUT_IMAGE},
    ),
    "T2I-Adapter": lambda t: (
        diffusers.StableDiffusionAdapterPipeline,
        make_unet(),
        {"adapter": make_t2i_adapter()},
        {"image": INPUT_IMAGE},
    ),
    "InstructPix2Pix": lambda t: (
        diffusers.StableDiffusionInstructPix2PixPipeline,
        make_unet(in_channels=8),
        {},
        {"image": INPUT_IMAGE},
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
    "upscale": lambda t: (
        diffusers.StableDiffusionUpscalePipeline,
        make_unet(in_channels=7, num_class_embeds=1000),
        {"low_res_scheduler": diffusers.DDPMScheduler(**BETAS)},
        {"image": INPUT_IMAGE.resize((16, 16))},
    ),
    "unCLIP": lambda t: (
        diffusers.StableUnCLIPImg2ImgPipeline,
        make_unet(class_embed_type="projection", projection_class_embeddings_input_dim=2 * WIDTH),
        {
            "image_normalizer": StableUnCLIPImageNormalizer(WIDTH),
            "image_noising_scheduler": diffusers.DDPMScheduler(**BETAS),
            "image_encoder": make_image_encoder(),
            "feature_extractor": make_image_processor(),
        },
        {"image_embeds": torch.ones(1, WIDTH), "height": 32, "width": 32},
    ),
    "AnimateDiff": lambda t: (
        diffusers.AnimateDiffPipeline,
        make_unet(),
        {"motion_adapter": make_motion_adapter(), "feature_extractor": None, "image_encoder": None},
        {"num_frames": 2, "height": 32, "width": 32},
    ),
}


def gligen_unet():
    unet = make_unet(attention_type="gated")
    for name, parameter in unet.named_parameters():
        if "alpha_" in name:
            torch.nn.init.constant_(parameter, 0.5)
    return unet


MORE = {  # ways to run some of them, for what is cached
    "SDXL, denoising_end": lambda t: (
        diffusers.StableDiffusionXLPipeline,
        sdxl_unet(),
        sdxl_parts(t) | {"scheduler": diffusers.EulerDiscreteScheduler(**BETAS)},
        {"denoising_end": 0.7, "num_inference_steps": 14},
    ),
    "SDXL, denoising_start": lambda t: (
        diffusers.StableDiffusionXLImg2ImgPipeline,
        sdxl_unet(),
        sdxl_parts(t),
        {"image": torch.zeros(1, 4, 16, 16), "denoising_start": 0.4, "num_inference_steps": 18},
    ),
    "img2img of low strength": lambda t: (
        diffusers.StableDiffusionImg2ImgPipeline,
        make_unet(),
        {"scheduler": diffusers.DDIMScheduler(**BETAS)},
        IMAGE | {"strength": 0.5, "num_inference_steps": 18},
    ),
    "GLIGEN": lambda t: (
        diffusers.StableDiffusionGLIGENPipeline,
        gligen_unet(),
        {},
        {
            "gligen_phrases": ["a cat"],
            "gligen_boxes": [[0.1, 0.1, 0.6, 0.6]],
            "gligen_scheduled_sampling_beta": 1.0,
            "height": 32,
            "width": 32,
        },
    ),
    "Heun": lambda t: (
        diffusers.StableDiffusionPipeline,
        make_unet(),
        {"scheduler": diffusers.HeunDiscreteScheduler(**BETAS)},
        {"num_inference_steps": 8},
    ),
    "PLMS": lambda t: (diffusers.StableDiffusionPipeline, make_unet(), {}, {}),
    "guidance_rescale": lambda t: (
        diffusers.StableDiffusionPipeline,
        make_unet(),
        {"scheduler": diffusers.DPMSolverMultistepScheduler(**BETAS)},
        {"guidance_rescale": 0.7},
    ),
    "two prompts, two images each": lambda t: (
        diffusers.StableDiffusionPipeline,
        make_unet(),
        {"scheduler": diffusers.DDIMScheduler(**BETAS)},
        {"prompt": ["a cat", "a dog"], "num_images_per_prompt": 2},
    ),
}


def ip_adapter_weights(unet, width=WIDTH):
    """An IP-Adapter of 4 image tokens for embeddings and text of `width`: keys and values for each layer."""
    rng = torch.Generator().manual_seed(3)
    weights, number = {}, 1
    for name in unet.attn_processors:
        if name.endswith("attn2.processor"):
            attn = unet.get_submodule(name.removesuffix(".processor"))
            for part in ("to_k_ip", "to_v_ip"):
                weights[f"{number}.{part}.weight"] = torch.randn(attn.inner_dim, width, generator=rng)
            number += 2
    projection = {
        "proj.weight": torch.randn(4 * width, width, generator=rng),
        "proj.bias": torch.randn(4 * width, generator=rng),
        "norm.weight": torch.ones(width),
        "norm.bias": torch.zeros(width),
    }
    return {"image_proj": projection, "ip_adapter": weights}


def load_ip_adapter(pipe):
    pipe.load_ip_adapter(
        ip_adapter_weights(pipe.unet), subfolder="", weight_name="", image_encoder_folder=None
    )


LORA = {"r": 2, "target_modules": ["to_q", "to_v"], "init_lora_weights": False}
"""Of one's own adapter."""


def load_lora(pipe):
    config = LoraConfig(r=2, target_modules=["to_q", "to_k", "to_v", "to_out.0"], init_lora_weights=False)
    torch.manual_seed(4)
    pipe.unet.add_adapter(config, adapter_name="style")


@dataclass
class Feature:
    """A feature and its way back."""

    on: Callable
    off: Callable


FEATURES = {
    "IP-Adapter": Feature(load_ip_adapter, lambda p: p.unload_ip_adapter()),
    "LoRA": Feature(load_lora, lambda p: p.unload_lora_weights()),
    "fused QKV": Feature(lambda p: p.fuse_qkv_projections(), lambda p: p.unfuse_qkv_projections()),
    "attention slicing": Feature(
        lambda p: p.enable_attention_slicing(1), lambda p: p.disable_attention_slicing()
    ),
    "unfused attention": Feature(
        lambda p: p.unet.set_attn_processor(AttnProcessor()),
        lambda p: p.unet.set_attn_processor(AttnProcessor2_0()),
    ),
    "FreeU": Feature(lambda p: p.enable_freeu(0.9, 0.2, 1.2, 1.4), lambda p: p.disable_freeu()),
    "VAE tiling": Feature(lambda p: p.vae.enable_tiling(), lambda p: p.vae.disable_tiling()),
}
