"""Every kind of pipeline that the suites run, and the features of the host that change its processors."""

from collections import namedtuple

import diffusers
import pytest
import torch
from callers import draw
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

SIZE = {"height": 32, "width": 32}
ONE = {"image": INPUT_IMAGE}
IMAGE = ONE | {"strength": 1.0}
INPAINT = IMAGE | {"mask_image": Image.radial_gradient("L").resize((32, 32))} | SIZE
REFINER = {
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 8,
    "projection_class_embeddings_input_dim": 5 * 8 + WIDTH,
}
NO_TEXT_ENCODER = {"tokenizer": None, "text_encoder": None, "requires_aesthetics_score": True}


def host(cls, unet=None, parts=None, **inputs):
    """The pipeline's class, its U-Net, other parts, and inputs."""
    return getattr(diffusers, f"{cls}Pipeline"), unet or make_unet(), parts or {}, inputs


def scheduled(kind, **settings):
    return {"scheduler": getattr(diffusers, f"{kind}Scheduler")(**BETAS, **settings)}


def depth():
    return {"depth_map": torch.rand(1, 32, 32, generator=torch.Generator().manual_seed(0))}


def unclip_unet():
    return make_unet(class_embed_type="projection", projection_class_embeddings_input_dim=2 * WIDTH)


def unclip_parts():
    return {
        "image_normalizer": StableUnCLIPImageNormalizer(WIDTH),
        "image_noising_scheduler": diffusers.DDPMScheduler(**BETAS),
        "image_encoder": make_image_encoder(),
        "feature_extractor": make_image_processor(),
    }


def motion():
    return {"motion_adapter": make_motion_adapter(), "feature_extractor": None, "image_encoder": None}


def gligen_unet():
    unet = make_unet(attention_type="gated")
    for name, parameter in unet.named_parameters():
        if "alpha_" in name:
            torch.nn.init.constant_(parameter, 0.5)
    return unet


SD, XL, XL_IMAGE = "StableDiffusion", "StableDiffusionXL", "StableDiffusionXLImg2Img"
SD2 = {"upcast_attention": True, "use_linear_projection": True}
V, TRAILING = {"prediction_type": "v_prediction"}, {"timestep_spacing": "trailing"}
NO_DEPTH = {"depth_estimator": None, "feature_extractor": None}
FEW = {"num_inference_steps": 4}
HOSTS = {
    "SD 1.x": lambda t: host(SD),
    "SD 2.x": lambda t: host(SD, make_unet(**SD2), scheduled("DDIM", **V)),
    "SDXL": lambda t: host(XL, sdxl_unet(), sdxl_parts(t)),
    "SDXL img2img": lambda t: host(XL_IMAGE, sdxl_unet(), sdxl_parts(t), **IMAGE),
    "SDXL refiner": lambda t: host(
        XL_IMAGE, make_sdxl_unet(**REFINER), sdxl_parts(t) | NO_TEXT_ENCODER, **IMAGE
    ),
    "img2img": lambda t: host(f"{SD}Img2Img", **IMAGE),
    "inpaint": lambda t: host(f"{SD}Inpaint", **INPAINT),
    "inpaint, 9 channels": lambda t: host(f"{SD}Inpaint", make_unet(in_channels=9), **INPAINT),
    "depth2img": lambda t: host(f"{SD}Depth2Img", make_unet(in_channels=5), NO_DEPTH, **IMAGE, **depth()),
    "ControlNet": lambda t: host(f"{SD}ControlNet", None, {"controlnet": make_controlnet()}, **ONE),
    "T2I-Adapter": lambda t: host(f"{SD}Adapter", None, {"adapter": make_t2i_adapter()}, **ONE),
    "InstructPix2Pix": lambda t: host(f"{SD}InstructPix2Pix", make_unet(in_channels=8), **ONE),
    "LCM": lambda t: host("LatentConsistencyModel", make_unet(time_cond_proj_dim=8), scheduled("LCM"), **FEW),
    "SD Turbo": lambda t: host(
        SD, None, scheduled("EulerAncestralDiscrete", **TRAILING), guidance_scale=0.0, **FEW
    ),
    "upscale": lambda t: host(
        f"{SD}Upscale",
        make_unet(in_channels=7, num_class_embeds=1000),
        {"low_res_scheduler": diffusers.DDPMScheduler(**BETAS)},
        image=INPUT_IMAGE.resize((16, 16)),
    ),
    "unCLIP": lambda t: host(
        "StableUnCLIPImg2Img", unclip_unet(), unclip_parts(), image_embeds=torch.ones(1, WIDTH), **SIZE
    ),
    "AnimateDiff": lambda t: host("AnimateDiff", None, motion(), num_frames=2, **SIZE),
}


BOXES = {
    "gligen_phrases": ["a cat"],
    "gligen_boxes": [[0.1, 0.1, 0.6, 0.6]],
    "gligen_scheduled_sampling_beta": 1.0,
}
LATE = {"image": torch.zeros(1, 4, 16, 16), "denoising_start": 0.4, "num_inference_steps": 18}
EARLY = {"denoising_end": 0.7, "num_inference_steps": 14}
WEAK = IMAGE | {"strength": 0.5, "num_inference_steps": 18}
TWO = {"prompt": ["a cat", "a dog"], "num_images_per_prompt": 2}
MORE = {  # ways to run some of them, for what is cached
    "SDXL, denoising_end": lambda t: host(
        XL, sdxl_unet(), sdxl_parts(t) | scheduled("EulerDiscrete"), **EARLY
    ),
    "SDXL, denoising_start": lambda t: host(XL_IMAGE, sdxl_unet(), sdxl_parts(t), **LATE),
    "img2img of low strength": lambda t: host(f"{SD}Img2Img", None, scheduled("DDIM"), **WEAK),
    "GLIGEN": lambda t: host(f"{SD}GLIGEN", gligen_unet(), **BOXES, **SIZE),
    "Heun": lambda t: host(SD, None, scheduled("HeunDiscrete"), num_inference_steps=8),
    "PLMS": lambda t: host(SD),
    "guidance_rescale": lambda t: host(SD, None, scheduled("DPMSolverMultistep"), guidance_rescale=0.7),
    "two prompts, two images each": lambda t: host(SD, None, scheduled("DDIM"), **TWO),
}


ALIKE = {"SD 2.x", "SDXL img2img", "SDXL refiner", "img2img", "inpaint", "depth2img"}
ALIKE |= {"SDXL, denoising_end", "guidance_rescale"}
"""Those whose U-Net and calls are like another's: they are run with `-m slow`."""


def cases(names):
    """Parameters of a test of hosts."""
    return [pytest.param(name, marks=[pytest.mark.slow] * (name in ALIKE), id=name) for name in names]


def build_host(make_pipeline, tokenizer, name, **settings):
    """A pipeline, and a function that runs it to its last latents."""
    cls, unet, parts, inputs = (HOSTS | MORE)[name](tokenizer)
    pipe = make_pipeline(unet=unet, cls=cls, **parts)

    def run(**more):
        torch.manual_seed(0)
        return draw(pipe, **settings | inputs | more)

    return pipe, run


LORA = {"r": 2, "target_modules": ["to_q", "to_v"], "init_lora_weights": False}
"""Of one's own adapter."""


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


def load_lora(pipe):
    config = LoraConfig(r=2, target_modules=["to_q", "to_k", "to_v", "to_out.0"], init_lora_weights=False)
    torch.manual_seed(4)
    pipe.unet.add_adapter(config, adapter_name="style")


Feature = namedtuple("Feature", "on off")  # and its way back
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
