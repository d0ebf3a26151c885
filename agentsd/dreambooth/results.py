"""What a run shows and leaves: validation images, the model, a grid of images, and its upload."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import Accelerator
from diffusers.training_utils import free_memory, offload_models
from diffusers.utils import make_image_grid
from diffusers.utils.hub_utils import load_or_create_model_card, populate_model_card
from huggingface_hub import ModelCard
from PIL import Image

from ..recipe import Recipe
from .config import DreamBoothConfig
from .images import generate
from .inputs import Bar
from .models import save_model

logger = logging.getLogger(__name__)


@contextmanager
def or_a_warning(what: str) -> Iterator[None]:
    """Let a run go on where what it draws or tells fails; it trains all the same."""
    try:
        yield
    except Exception as error:
        logger.warning("%s failed, and the run goes on: %s: %s", what, type(error).__name__, error)
        free_memory()


def validate(
    pipe: Any, prompt: str, config: DreamBoothConfig, accelerator: Accelerator, step: int, bar: Bar
) -> None:
    """Images of the validation prompt, to the output folder and to the trackers."""
    recipe = config.recipe if config.apply == "generate" else None  # in training it is there
    path = config.output_dir / f"validation-{step}.png"
    drawn = _draw(pipe, prompt, path, config, accelerator, recipe, bar)
    made = np.stack([np.asarray(image) for image in drawn])
    for tracker in accelerator.trackers:
        layout = {"dataformats": "NHWC"} if tracker.name == "tensorboard" else {}
        tracker.log_images({"validation": made}, step=step, **layout)


def finish(
    pipe: Any,
    modules: dict[str, Any],
    handle: Any,
    config: DreamBoothConfig,
    accelerator: Accelerator,
    repository: str | None,
    bar: Bar,
) -> None:
    """Save the model; then draw a grid with what was saved, and push it to the hub.

    Args:
        pipe, modules, handle: as `save_model` has them.
        config, accelerator: of the run.
        repository: on the hub, if there is to be one.
        bar: shows how many images are drawn.
    """
    folder = config.output_dir
    save_model(modules, config, handle)
    with or_a_warning("drawing grid.png"):
        prompt, recipe = config.validation_prompt or config.instance_prompt, None
        if config.apply != "none":
            recipe = folder
        _draw(pipe, prompt, folder / "grid.png", config, accelerator, recipe, bar)
    if repository is not None:
        from huggingface_hub import upload_folder

        with or_a_warning(f"the upload to {repository}"):
            _model_card(config, repository).save(folder / "README.md")
            apart = ["checkpoint-*", ".*", f"{config.logging_dir}/*"]
            upload_folder(
                repo_id=repository, folder_path=folder, token=config.hub_token, ignore_patterns=apart
            )


def _model_card(config: DreamBoothConfig, repository: str) -> ModelCard:
    """The repository's card, with the base model if it is of the hub, and no folder of the user's."""
    source: Any = config.pretrained_model_name_or_path
    if source == "demo" or Path(source).is_dir():
        source = None
    card = load_or_create_model_card(
        repository,
        token=config.hub_token,
        from_training=True,
        base_model=source,
        prompt=config.instance_prompt,
        model_description=(
            f"DreamBooth by agentsd. The prompt of the subject is `{config.instance_prompt}`. With "
            "`agentsd.json` here, `apply_agentsd(pipe, recipe=FOLDER)` generates with agent attention."
        ),
    )
    tags = ["text-to-image", "diffusers", "diffusers-training", "stable-diffusion", "dreambooth"]
    return populate_model_card(card, [*tags, "lora"] if config.rank else tags)


def _draw(
    pipe: Any,
    prompt: str,
    path: Path,
    config: DreamBoothConfig,
    accelerator: Accelerator,
    recipe: Recipe | Path | None,
    bar: Bar,
) -> list[Image.Image]:
    """Draw images side by side to a file, with what was moved off the device back on it meanwhile."""
    seeds = range(config.seed, config.seed + config.num_validation_images)
    with offload_models(pipe.vae, pipe.text_encoder, device=accelerator.device), accelerator.autocast():
        advance, made = bar(path.name, len(seeds)), []
        for image in generate(pipe, prompt, seeds, config, recipe):
            made.append(image)
            advance()
    make_image_grid(made, rows=1, cols=len(made)).save(path)
    return made
