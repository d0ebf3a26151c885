"""Stable Diffusion's pipelines as users have them on disk: every part and file, at tiny widths."""

import sys
import types

import torch
from diffusers import (
    DDIMScheduler,
    EulerDiscreteScheduler,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
)
from diffusers.pipelines.stable_diffusion import StableDiffusionSafetyChecker
from tiny import (
    BETAS,
    TRANSFORMER,
    make_image_encoder,
    make_image_processor,
    make_scheduler,
    make_text_encoder,
    make_unet,
    make_vae,
    sdxl_parts,
    sdxl_unet,
)
from transformers import CLIPConfig, CLIPModel, CLIPProcessor, ViTConfig, ViTImageProcessorPil, ViTModel

SD15_UNET = {
    "sample_size": 64,
    "block_out_channels": (32, 32, 64, 64),
    "down_block_types": ("CrossAttnDownBlock2D",) * 3 + ("DownBlock2D",),
    "up_block_types": ("UpBlock2D",) + ("CrossAttnUpBlock2D",) * 3,
    "layers_per_block": 1,
    "attention_head_dim": 8,
    "norm_num_groups": 8,
}


def make_sd_vae():
    """An autoencoder that takes eight pixels to one."""
    return make_vae(levels=4, sample_size=512)


def make_safety_checker():
    """A checker that calls every image unsafe: where it is not left out, images are black."""
    vision = make_image_encoder().config.to_dict()
    torch.manual_seed(0)
    checker = StableDiffusionSafetyChecker(CLIPConfig(vision_config=vision, projection_dim=16)).eval()
    torch.nn.init.constant_(checker.concept_embeds_weights, -2.0)
    return checker


def _parts(tokenizer, unet, scheduler):
    models = {"vae": make_sd_vae(), "text_encoder": make_text_encoder(tokenizer), "unet": unet}
    return models | {"tokenizer": tokenizer, "scheduler": scheduler}


def save_sd15(folder, tokenizer, variant=None):
    """Write a pipeline of Stable Diffusion 1.5's parts; "fp16" as half-precision files alone."""
    parts = _parts(tokenizer, make_unet(**SD15_UNET), make_scheduler())
    pipe = StableDiffusionPipeline(
        **parts, safety_checker=make_safety_checker(), feature_extractor=make_image_processor()
    )
    return _save(pipe, folder, variant)


def save_sd21(folder, tokenizer):
    """Write a pipeline as SD 2.1's: v-prediction, upcast attention, linear projections, no checker."""
    linear = {"attention_head_dim": (2, 2, 4, 4), "upcast_attention": True, "use_linear_projection": True}
    v = {
        "prediction_type": "v_prediction",
        "set_alpha_to_one": False,
        "steps_offset": 1,
        "clip_sample": False,
    }
    parts = _parts(tokenizer, make_unet(**SD15_UNET | linear), DDIMScheduler(**BETAS, **v))
    unsafe = {"safety_checker": None, "requires_safety_checker": False}
    return _save(StableDiffusionPipeline(**parts, **unsafe, feature_extractor=make_image_processor()), folder)


def save_sdxl(folder, tokenizer, variant=None):
    parts = _parts(tokenizer, sdxl_unet(), EulerDiscreteScheduler(**BETAS)) | sdxl_parts(tokenizer)
    return _save(StableDiffusionXLPipeline(**parts, add_watermarker=False), folder, variant)


def save_clip(folder, tokenizer):
    parts = make_text_encoder(tokenizer, projection=True).config, make_image_encoder().config
    text, vision = (part.to_dict() for part in parts)
    torch.manual_seed(0)
    CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)).save_pretrained(folder)
    CLIPProcessor(image_processor=make_image_processor(), tokenizer=tokenizer).save_pretrained(folder)
    return folder


def save_dino(folder):
    """Write a ViT as DINO's are."""
    sizes = {name: size for name, size in TRANSFORMER.items() if name != "projection_dim"}
    torch.manual_seed(0)
    ViTModel(ViTConfig(image_size=32, patch_size=8, **sizes)).save_pretrained(folder)
    ViTImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(folder)
    return folder


def _save(pipe, folder, variant=None):
    if variant == "fp16":
        pipe.to(torch.float16)
    pipe.save_pretrained(folder, variant=variant)
    # Published folders name the class that is there with torchvision and without.
    for path in (folder / "model_index.json", folder / "feature_extractor" / "preprocessor_config.json"):
        if path.exists():
            path.write_text(path.read_text().replace("CLIPImageProcessorPil", "CLIPImageProcessor"))
    return folder


def stand_in_for_inception(monkeypatch):
    """Put a module in the place of pytorch-fid's, which needs torchvision."""
    projection = torch.randn(3, 2048, generator=torch.Generator().manual_seed(0))
    inception = types.ModuleType("pytorch_fid.inception")

    class InceptionV3(torch.nn.Module):
        def __init__(self, blocks):
            super().__init__()
            assert blocks == [3]  # the block that FID is computed on
            self.projection = projection

        def forward(self, pixels):
            assert 0 <= pixels.min() <= pixels.max() <= 1
            return [(pixels.mean((2, 3)) @ self.projection)[..., None, None]]

    inception.InceptionV3 = InceptionV3
    package = types.ModuleType("pytorch_fid")
    package.inception = inception
    monkeypatch.setitem(sys.modules, "pytorch_fid", package)
