"""The memory of a training step, by parts, and whether it fits the card that is there."""

from __future__ import annotations

import math
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from transformers import CLIPTextConfig, CLIPTextModel

from ..apply import apply_agentsd
from .config import DreamBoothConfig
from .counting import Storages, compute_in, fused_attention
from .models import DTYPES, check_kind, load_source, make_trainable, trained_in
from .optimizer import moment_bytes
from .pretrained import load_index

SPARE = 1.0
"""GB that CUDA, its libraries and PyTorch's allocator take beside what is counted; 0.7 on an H200."""


def training_memory(config: DreamBoothConfig, eight_bits: bool, fused: bool = True) -> dict[str, int]:
    """Bytes of each part of a training step at its peak, on one device.

    The model's own files of settings are read, and no weights. What CUDA takes for itself is not counted.

    Args:
        config: of the run.
        eight_bits: whether the optimizer's moments take 8 bits.
        fused: whether attention keeps no scores, as on a GPU.

    Raises:
        OSError, ValueError: the model's settings can't be read, or it is none that is trained here.
    """
    pipe = _hollow(config)
    with Storages("meta") as storages, fused_attention() if fused else nullcontext():
        return _parts(pipe, config, eight_bits, storages)


def report(config: DreamBoothConfig) -> list[str]:
    """Lines that say what a training step takes, and whether it fits the CUDA device that is there."""
    parts = {
        name: size / 1e9 for name, size in training_memory(config, config.use_8bit_adam is not False).items()
    }
    total = sum(parts.values())
    lines = ["memory of a training step in GB (1e9 bytes), computed from shapes:"]
    lines += [f"  {name:<18}{size:6.2f}" for name, size in (parts | {"in all": total}).items()]
    needed = total + SPARE
    lines.append(f"With {SPARE:g} GB for CUDA and PyTorch's allocator that is {needed:.1f} GB.")
    if not torch.cuda.is_available():
        return [*lines, f"No CUDA device is here: take one of {math.ceil(needed)} GB or more."]
    card = torch.cuda.get_device_properties(0)
    fits = card.total_memory / 1e9 >= needed
    told = f"{card.name} has {card.total_memory / 1e9:.1f} GB: it {'fits' if fits else 'does not fit'}."
    if not fits and (levers := _levers(config)):
        told += f" What takes less: {', '.join(levers)}."
    return [*lines, told]


def _levers(config: DreamBoothConfig) -> list[str]:
    """Options that save memory and are not taken, the dearest in images last."""
    free = {
        "--gradient_checkpointing": config.gradient_checkpointing,
        "--use_8bit_adam": config.use_8bit_adam is not False,
        "--mixed_precision fp16": config.precision != "no",
        "--pre_compute_text_embeddings": config.pre_compute_text_embeddings or config.train_text_encoder,
        "--cache_latents --center_crop": config.cache_latents,
        "--train_batch_size 1": config.train_batch_size == 1,
        "--rank 4": config.rank is not None,
    }
    return [option for option, taken in free.items() if not taken]


def _parts(pipe: Any, config: DreamBoothConfig, eight_bits: bool, storages: Storages) -> dict[str, int]:
    modules = make_trainable(pipe, config)
    if config.apply == "train+generate":
        apply_agentsd(pipe.unet, recipe=config.recipe)
    trained = trained_in(modules)
    parts = {
        "U-Net": sum(p.nbytes for p in pipe.unet.parameters()),
        "text encoder": sum(p.nbytes for p in pipe.text_encoder.parameters()),
        "VAE": sum(p.nbytes for p in pipe.vae.parameters()),
        "gradients": sum(p.nbytes for p in trained),
        "moments of AdamW": moment_bytes(trained, eight_bits),
    }
    if config.pre_compute_text_embeddings:
        parts["text encoder"] = 0
    if config.cache_latents:
        parts["VAE"] = 0
    if (dtype := DTYPES[config.precision]) != torch.float32:
        for model in (pipe.unet, pipe.text_encoder, pipe.vae):
            compute_in(dtype, model)
    storages.live = storages.peak = 0
    for _ in range(min(config.gradient_accumulation_steps, 2)):  # later batches find gradients there
        _one_batch(pipe, config)
    parts["activations"] = max(0, storages.peak - parts["gradients"])
    return parts


def _one_batch(pipe: Any, config: DreamBoothConfig) -> None:
    """The forward and backward of `training.Run._loss`, as far as memory goes."""
    batch = config.train_batch_size * (1 + config.with_prior_preservation)
    unet, vae, size = pipe.unet, pipe.vae, config.resolution
    factor = 2 ** (len(vae.config.block_out_channels) - 1)
    size = size or unet.config.sample_size * factor
    like: dict[str, Any] = {"device": "meta"}
    if not config.cache_latents:
        with torch.no_grad():
            vae.encode(torch.zeros(batch, 3, size, size, dtype=vae.dtype, **like))
    width, length = unet.config.cross_attention_dim, pipe.text_encoder.config.max_position_embeddings
    if config.pre_compute_text_embeddings:
        text = torch.zeros(batch, length, width, **like)
    else:
        text = pipe.text_encoder(torch.zeros(batch, length, dtype=torch.int64, **like))[0]
    latents = torch.zeros(batch, unet.config.in_channels, size // factor, size // factor, **like)
    unet(latents, 1, text).sample.float().square().mean().backward()


def _hollow(config: DreamBoothConfig) -> SimpleNamespace:
    """The parts of the pipeline, without weights."""
    source, revision = config.pretrained_model_name_or_path, config.revision
    if source == "demo":
        demo = load_source(config)
        configs: Any = demo.unet.config, demo.vae.config, demo.text_encoder.config
    else:
        load_index(source, revision)
        text: Any = CLIPTextConfig.from_pretrained(
            source, subfolder="text_encoder", revision=revision or "main"
        )
        configs = (
            UNet2DConditionModel.load_config(source, subfolder="unet", revision=revision),
            AutoencoderKL.load_config(source, subfolder="vae", revision=revision),
            text,
        )
    check_kind(source, configs[0])
    with torch.device("meta"):
        return SimpleNamespace(
            unet=UNet2DConditionModel.from_config(configs[0]),
            vae=AutoencoderKL.from_config(configs[1]),
            text_encoder=CLIPTextModel(configs[2]),
        )
