"""Images drawn by the model as it is trained, and those of the class before training."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from diffusers import DDIMScheduler
from PIL import Image

from ..apply import apply_agentsd
from ..recipe import Recipe
from .config import DreamBoothConfig
from .data import image_paths


def generate(
    pipe: Any,
    prompt: str,
    seeds: Sequence[int],
    config: DreamBoothConfig,
    recipe: Recipe | Path | None = None,
    batch: int = 1,
) -> Iterator[Image.Image]:
    """Images of a prompt, one for each seed, `batch` at a time, by DDIM.

    A recipe is applied meanwhile; the pipeline is left as it was.
    """
    scheduler, modes = pipe.scheduler, {part: part.training for part in (pipe.unet, pipe.text_encoder)}
    pipe.scheduler = DDIMScheduler.from_config(scheduler.config, clip_sample=False)
    for part in modes:
        part.eval()
    try:
        with nullcontext() if recipe is None else apply_agentsd(pipe, recipe=recipe):
            for start in range(0, len(seeds), batch):
                some = seeds[start : start + batch]
                yield from pipe(
                    [prompt] * len(some),
                    num_inference_steps=config.num_inference_steps,
                    guidance_scale=config.guidance_scale,
                    generator=[torch.Generator("cpu").manual_seed(seed) for seed in some],
                    height=config.resolution,
                    width=config.resolution,
                ).images
    finally:
        pipe.scheduler = scheduler
        for part, training in modes.items():
            part.train(training)


def missing_class_images(config: DreamBoothConfig) -> list[int]:
    """Numbers of the class images that the folder lacks; each is added to its image's seed.

    Images of any kind count, whoever put them there, and no number is taken twice: an interrupted run goes
    on where it stopped.
    """
    folder = config.class_data_dir
    assert folder is not None
    folder.mkdir(parents=True, exist_ok=True)
    free = (n for n in itertools.count() if not os.path.lexists(_class_image(folder, n)))
    return list(itertools.islice(free, max(0, config.num_class_images - len(image_paths(folder)))))


def draw_class_images(
    pipe: Any, config: DreamBoothConfig, numbers: Sequence[int], on_image: Callable[[], None]
) -> None:
    """Draw the class images of these numbers in batches, without agents; no file is written over."""
    assert config.class_data_dir is not None
    assert config.class_prompt is not None
    seeds = [config.seed + number for number in numbers]
    made = generate(pipe, config.class_prompt, seeds, config, batch=config.sample_batch_size)
    for number, image in zip(numbers, made, strict=True):
        _write_new(image, _class_image(config.class_data_dir, number))
        on_image()


def _class_image(folder: Path, number: int) -> Path:
    return folder / f"class-{number:05d}.png"


def _write_new(image: Image.Image, path: Path) -> None:
    """Write a PNG file whole, or not at all; not where there is one by now.

    It gets its name when it is complete: a process that is killed leaves no broken image behind. Until then
    its name is this process's own, as another run may draw into the same folder.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        image.save(partial, format="PNG")
        if not os.path.lexists(path):
            partial.rename(path)
    finally:
        partial.unlink(missing_ok=True)
