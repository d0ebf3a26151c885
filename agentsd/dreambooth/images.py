"""Images that a run draws: of the class before training, for validation, and a grid of them at the end."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from diffusers import DDIMScheduler
from diffusers.utils import make_image_grid
from PIL import Image

from ..patch import apply_agentsd
from .config import DreamBoothConfig


def generate(
    pipe: Any,
    prompt: str,
    count: int,
    config: DreamBoothConfig,
    on_image: Callable[[int, Image.Image], None] | None = None,
) -> list[Image.Image]:
    """`count` images of a prompt from seeds `config.seed`, `config.seed + 1`, ...: DDIM, one at a time.

    Agent attention runs in all steps unless `config.apply` is "none". The pipeline is left as it was.
    """
    scheduler, training = pipe.scheduler, pipe.unet.training
    pipe.scheduler = DDIMScheduler.from_config(scheduler.config, clip_sample=False)
    pipe.unet.eval()
    patched = hasattr(pipe.unet, "_agentsd")
    agent = nullcontext() if patched or config.apply == "none" else apply_agentsd(pipe, recipe=config.recipe)
    images = []
    try:
        with agent, torch.no_grad():
            for i in range(count):
                image = pipe(
                    prompt,
                    num_inference_steps=config.num_inference_steps,
                    guidance_scale=config.guidance_scale,
                    generator=torch.Generator().manual_seed(config.seed + i),
                    height=config.resolution,
                    width=config.resolution,
                ).images[0]
                images.append(image)
                if on_image is not None:
                    on_image(i, image)
    finally:
        pipe.scheduler = scheduler
        pipe.unet.train(training)
    return images


def fill_class_folder(pipe: Any, config: DreamBoothConfig, on_image: Callable[[], None]) -> None:
    """Generate the class images that `config.num_class_images` asks for and the folder lacks.

    Each is written at once and whole, so an interrupted call goes on where it stopped.
    """
    assert config.class_data_dir is not None
    assert config.class_prompt is not None
    folder = config.class_data_dir
    folder.mkdir(parents=True, exist_ok=True)
    have = len([p for p in folder.iterdir() if p.suffix == ".png"])

    def write(i: int, image: Image.Image) -> None:
        partial = folder / f".{have + i}.partial"
        image.save(partial, format="PNG")
        os.replace(partial, folder / f"class-{have + i:05d}.png")
        on_image()

    baseline = config.model_copy(update={"apply": "none", "seed": config.seed + have})
    generate(pipe, config.class_prompt, max(0, config.num_class_images - have), baseline, write)


def save_grid(images: list[Image.Image], path: Path) -> None:
    """Write images side by side."""
    make_image_grid(images, rows=1, cols=len(images)).save(path)
