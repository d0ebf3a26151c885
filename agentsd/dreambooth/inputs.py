"""What batches are made of: class images drawn where some lack, and what is encoded ahead."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from diffusers.training_utils import free_memory
from torch import Tensor

from .config import DreamBoothConfig
from .data import SubjectImages, image_paths, load_image
from .images import draw_class_images, missing_class_images
from .models import DTYPES, load_source

Bar = Callable[[str, int], Callable[[], None]]
"""From a title and a total to what advances a progress bar by one."""


@torch.no_grad()
def make_inputs(
    pipe: Any,
    config: DreamBoothConfig,
    accelerator: Accelerator,
    instance: list[Path],
    classes: list[Path],
) -> SubjectImages:
    """The batches of a run, from images of the subject and of its class, if there are any.

    VAE and text encoder leave the device if all is encoded ahead.
    """
    device = accelerator.device
    size = config.resolution or pipe.unet.config.sample_size * pipe.vae_scale_factor
    load: Any = partial(load_image, resolution=size)
    if config.cache_latents:
        made = {path: encode(pipe.vae, load(path)[None])[0].cpu() for path in (*instance, *classes)}
        load = partial(_look_up, made)
        pipe.vae.to("cpu")
    own, prior = (
        _tokens(pipe.tokenizer, prompt or "") for prompt in (config.instance_prompt, config.class_prompt)
    )
    if config.pre_compute_text_embeddings:
        own, prior = (pipe.text_encoder(ids.to(device))[0].cpu() for ids in (own, prior))
        pipe.text_encoder.to("cpu")
    free_memory()
    return SubjectImages(
        instance,
        classes,
        own,
        prior,
        load,
        config.train_batch_size,
        config.seed,
        accelerator.process_index,
        accelerator.num_processes,
        random_crop=not config.center_crop,
    )


@torch.no_grad()
def encode(vae: Any, images: Tensor) -> Tensor:
    """Mean and log variance of the latents of images (B, 3, H, W), as (B, 2C, h, w)."""
    moments: Tensor = vae.encode(images.to(vae.device, vae.dtype)).latent_dist.parameters
    return moments


def make_class_images(config: DreamBoothConfig, accelerator: Accelerator, bar: Bar) -> list[Path]:
    """The class images, if any; each process draws its share of those that are missing.

    A pipeline of its own draws them: the one that is trained has its weights in the run's precision.
    """
    if not config.with_prior_preservation:
        return []
    assert config.class_data_dir is not None
    missing = missing_class_images(config)
    accelerator.wait_for_everyone()  # before there are more
    mine = missing[accelerator.process_index :: accelerator.num_processes]
    if mine:
        dtype = DTYPES[config.prior_generation_precision or config.precision]
        pipe = load_source(config)
        for part in (pipe.vae, pipe.text_encoder, pipe.unet):  # diffusers' own way warns, of nothing
            torch.nn.Module.to(part, accelerator.device, dtype)
        pipe.set_progress_bar_config(disable=True)
        draw_class_images(pipe, config, mine, bar("class images", len(mine)))
        del pipe
        free_memory()
    accelerator.wait_for_everyone()
    return image_paths(config.class_data_dir)


def _tokens(tokenizer: Any, prompt: str) -> Tensor:
    """(1, L) tokens of a prompt."""
    length = tokenizer.model_max_length
    like = {"padding": "max_length", "truncation": True, "max_length": length, "return_tensors": "pt"}
    ids: Tensor = tokenizer(prompt, **like).input_ids
    return ids


def _look_up(made: dict[Path, Tensor], path: Path, place: tuple[float, float]) -> Tensor:
    return made[path]
