"""Images that a run draws: of the class before training, for validation, and a grid of them at the end."""

from __future__ import annotations

import io
import itertools
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from diffusers import DDIMScheduler
from diffusers.utils import make_image_grid
from PIL import Image

from ..apply import apply_agentsd
from .config import DreamBoothConfig
from .data import image_paths


def generate(
    pipe: Any,
    prompt: str,
    count: int,
    config: DreamBoothConfig,
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
                    generator=torch.Generator("cpu").manual_seed(config.seed + i),
                    height=config.resolution,
                    width=config.resolution,
                ).images[0]
                images.append(image)
    finally:
        pipe.scheduler = scheduler
        pipe.unet.train(training)
    return images


def fill_class_folder(pipe: Any, config: DreamBoothConfig, on_image: Callable[[], None]) -> None:
    """Generate the class images that `config.num_class_images` asks for and the folder lacks.

    Images of any kind count, whoever put them there, and none is ever overwritten: each new one takes the
    first free number, which is also added to its seed. An interrupted call goes on where it stopped.
    """
    assert config.class_data_dir is not None
    assert config.class_prompt is not None
    folder = config.class_data_dir
    folder.mkdir(parents=True, exist_ok=True)
    for number in itertools.count():
        path = folder / f"class-{number:05d}.png"
        if len(image_paths(folder)) >= config.num_class_images:
            return
        if not os.path.lexists(path):
            seeded = config.model_copy(update={"apply": "none", "seed": config.seed + number})
            if _write_new(generate(pipe, config.class_prompt, 1, seeded)[0], path):
                on_image()


def _write_new(image: Image.Image, path: Path) -> bool:
    """Write a PNG file whole, or not at all; not where there is one by now (of a process beside this)."""
    content = io.BytesIO()
    image.save(content, format="PNG")
    try:
        with path.open("xb") as file:
            file.write(content.getvalue())
    except FileExistsError:
        return False
    except BaseException:  # a full disk, Ctrl-C
        path.unlink(missing_ok=True)
        raise
    return True


def save_grid(images: list[Image.Image], path: Path) -> None:
    """Write images side by side."""
    make_image_grid(images, rows=1, cols=len(images)).save(path)
