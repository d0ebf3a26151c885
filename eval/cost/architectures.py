"""Stable Diffusion's architectures with random weights: they cost what the trained models cost."""

from collections.abc import Sequence
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    PNDMScheduler,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)

SD15: dict[str, Any] = {"sample_size": 64, "cross_attention_dim": 768, "attention_head_dim": 8}
SDXL: dict[str, Any] = {
    "sample_size": 128,
    "block_out_channels": (320, 640, 1280),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "transformer_layers_per_block": (1, 2, 10),
    "attention_head_dim": (5, 10, 20),
    "cross_attention_dim": 2048,
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
}


def autoencoder(size: int = 512) -> Any:
    """Return the autoencoder of both, random, for images of so many pixels on a side."""
    return AutoencoderKL(
        block_out_channels=(128, 256, 512, 512),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=2,
        latent_channels=4,
        sample_size=size,
    )


def build(arch: str, device: torch.device, dtype: torch.dtype) -> Any:
    """Return a pipeline of the U-Net and VAE of "sd15" or "sdxl", random, without text encoders.

    It is called with `prompt_embeds`. The text encoders are left out: they run once an image and no
    method touches them.
    """
    shape = SDXL if arch == "sdxl" else SD15
    with torch.device("meta"):
        models: list[Any] = [UNet2DConditionModel(**shape), autoencoder(8 * shape["sample_size"])]
    unet, vae = (_drawn(model.to(dtype).to_empty(device=device).eval()) for model in models)
    betas = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
    scheduler = PNDMScheduler(**betas, skip_prk_steps=True, set_alpha_to_one=False, steps_offset=1)
    parts = {"vae": vae, "unet": unet, "scheduler": scheduler, "text_encoder": None, "tokenizer": None}
    if arch == "sdxl":
        parts |= {"text_encoder_2": None, "tokenizer_2": None}
        return StableDiffusionXLPipeline(**parts, add_watermarker=False)
    parts |= {"safety_checker": None, "feature_extractor": None}
    return StableDiffusionPipeline(**parts, requires_safety_checker=False)


@torch.no_grad()
def _drawn(model: Any) -> Any:
    """Return a model with random weights of the usual size, from a generator of its own."""
    rng = torch.Generator("cpu" if model.device.type == "meta" else model.device).manual_seed(0)
    for name, part in model.named_parameters():
        if part.ndim > 1:
            bound = part[0].numel() ** -0.5
            part.uniform_(-bound, bound, generator=rng)
        else:  # of norms, and biases
            part.fill_(float(name.endswith("weight")))
    return model


def normal(shape: Sequence[int], rng: torch.Generator, model: Any) -> torch.Tensor:
    """Return normal numbers, the same on every device, where a model takes them."""
    return torch.randn(shape, generator=rng, device="cpu").to(model.device, model.dtype)


def random_embeds(unet: Any, batch: int, rng: torch.Generator) -> dict[str, torch.Tensor]:
    """Return random `prompt_embeds` (B, 77, C) and, for SDXL, `pooled_prompt_embeds` (B, 1280)."""
    config = unet.config
    embeds = {"prompt_embeds": normal((batch, 77, config.cross_attention_dim), rng, unet)}
    if config.addition_embed_type == "text_time":
        pooled = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
        embeds["pooled_prompt_embeds"] = normal((batch, pooled), rng, unet)
    return embeds
