"""Tiny real pipelines, built from configs with random weights; nothing is downloaded."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers import (
    AutoencoderKL,
    PNDMScheduler,
    StableDiffusionPipeline,
    UNet2DConditionModel,
)
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer


def make_unet(**changes: Any) -> UNet2DConditionModel:
    """An SD 1.x U-Net of three levels, attention on all of them, two heads a block."""
    settings: dict[str, Any] = {
        "sample_size": 16,
        "block_out_channels": (16, 32, 32),
        "down_block_types": ("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
        "layers_per_block": 1,
        "cross_attention_dim": 16,
        "attention_head_dim": 2,
        "norm_num_groups": 4,
    }
    torch.manual_seed(0)
    return UNet2DConditionModel(**settings | changes).eval()


def make_sdxl_unet() -> UNet2DConditionModel:
    """An SDXL U-Net: no attention on the first level, several transformer blocks below it."""
    return make_unet(
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        transformer_layers_per_block=(1, 2, 3),
        use_linear_projection=True,
        attention_head_dim=(2, 2, 4),
    )


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> CLIPTokenizer:
    """A CLIP tokenizer that spells words letter by letter."""
    folder = tmp_path_factory.mktemp("tokenizer")
    letters = "abcdefghijklmnopqrstuvwxyz0123456789.,"
    words = ["<|startoftext|>", "<|endoftext|>", *letters, *(c + "</w>" for c in letters)]
    (folder / "vocab.json").write_text(json.dumps({w: i for i, w in enumerate(words)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    return CLIPTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"), model_max_length=20)


@pytest.fixture(scope="session")
def make_pipeline(tokenizer: CLIPTokenizer) -> Callable[..., StableDiffusionPipeline]:
    """Build a tiny StableDiffusionPipeline: `make_pipeline(unet=..., scheduler=...)`."""

    def build(unet: UNet2DConditionModel | None = None, scheduler: Any = None) -> StableDiffusionPipeline:
        torch.manual_seed(0)
        text = CLIPTextConfig(
            vocab_size=len(tokenizer),
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=20,
            bos_token_id=0,
            eos_token_id=1,
            pad_token_id=1,
        )
        vae = AutoencoderKL(
            block_out_channels=(8, 8),
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            layers_per_block=1,
            norm_num_groups=4,
            sample_size=32,
        )
        scheduler = scheduler or PNDMScheduler(
            beta_start=0.00085,
            beta_end=0.012,
            beta_schedule="scaled_linear",
            skip_prk_steps=True,
            steps_offset=1,
        )
        pipe = StableDiffusionPipeline(
            vae=vae.eval(),
            text_encoder=CLIPTextModel(text).eval(),
            tokenizer=tokenizer,
            unet=unet or make_unet(),
            scheduler=scheduler,
            safety_checker=None,
            feature_extractor=None,
            requires_safety_checker=False,
        )
        pipe.set_progress_bar_config(disable=True)
        return pipe

    return build


@pytest.fixture
def pipe(make_pipeline: Callable[..., StableDiffusionPipeline]) -> StableDiffusionPipeline:
    """A fresh tiny pipeline."""
    return make_pipeline()


@pytest.fixture
def sample() -> Callable[..., torch.Tensor]:
    """Run a pipeline to its final latents, (B, 4, 16, 16), from a seed."""

    def run(pipe: Any, seed: int = 0, **changes: Any) -> torch.Tensor:
        settings = {"prompt": "a cat", "num_inference_steps": 5, "output_type": "latent"} | changes
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="agentsd")
            return pipe(generator=torch.Generator().manual_seed(seed), **settings).images

    return run
