"""What a run would stumble over, told before anything is loaded, drawn or written."""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path

import torch
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

from .checkpoints import find_checkpoint, list_checkpoints
from .config import DreamBoothConfig
from .data import find_images, image_paths

logger = logging.getLogger(__name__)


def check_files(config: DreamBoothConfig) -> tuple[list[Path], list[Path], Path | None]:
    """Images of the subject, those of its class so far, and the checkpoint to go on from, if any.

    Raises:
        ValueError, OSError: a folder is missing, empty, broken or in use, or there is no such checkpoint.
    """
    instance, classes, place = find_images(config.instance_data_dir), [], config.class_data_dir
    if config.with_prior_preservation and place is not None and place.exists():
        if not place.is_dir():
            raise ValueError(f"class_data_dir={str(place)!r} is no folder: choose another")
        if image_paths(place):
            classes = find_images(place)
    folder, name = config.output_dir, config.resume_from_checkpoint
    have = list_checkpoints(folder)
    there = [] if name and have else _in_the_way(config)
    if there:
        told = ", or go on with its checkpoints by --resume_from_checkpoint latest" if have else ""
        raise ValueError(
            f"output_dir={str(folder)!r} holds {there[0]}, which the run might overwrite: choose another "
            f"folder{told}"
        )
    return instance, classes, find_checkpoint(folder, name) if name else None


def _in_the_way(config: DreamBoothConfig) -> list[str]:
    """Names in the output folder that a run didn't leave there before its first checkpoint.

    Logs and class images are added to; validation images are drawn again, if the run is to go on.
    """
    added_to = [config.output_dir / config.logging_dir]
    if config.class_data_dir is not None:
        added_to.append(config.class_data_dir)
    return sorted(
        path.name
        for path in config.output_dir.glob("*")
        if not path.name.startswith(".")
        and not any(place.resolve().is_relative_to(path.resolve()) for place in added_to)
        and not (config.resume_from_checkpoint and path.match("validation-*.png"))
    )


def check_device(config: DreamBoothConfig) -> None:
    """Raise ValueError for what this machine lacks, but for the optimizer, which knows its own needs."""
    cuda = torch.cuda.is_available()
    # A gradient scaler does not run on the CPU, nor on Apple's GPU.
    scales = torch.accelerator.is_available() and not torch.backends.mps.is_available()
    if config.precision == "fp16" and not scales:
        raise ValueError("mixed_precision='fp16' needs a CUDA device: pass 'bf16' or 'no'")
    if config.precision not in ("no", "fp16", "bf16"):
        raise ValueError(f"mixed_precision={config.precision!r} is not trained here: 'no', 'fp16' or 'bf16'")
    if config.precision == "bf16" and cuda and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise ValueError("mixed_precision='bf16': this card has no bfloat16; pass 'fp16' or 'no'")
    if config.enable_xformers_memory_efficient_attention and not importlib.util.find_spec("xformers"):
        raise ValueError(
            "enable_xformers_memory_efficient_attention: xformers is not installed; leave it out, PyTorch's "
            "own attention needs no more memory"
        )


def find_tracker(config: DreamBoothConfig) -> str | None:
    """What accelerate logs with; raises ValueError for one that it doesn't know or that isn't installed."""
    name, here = config.report_to, {str(one) for one in get_available_trackers()}
    if name in (None, "none") or name == "all" or name in here:
        return None if name == "none" else name
    if name not in LOGGER_TYPE_TO_CLASS:
        raise ValueError(f"report_to={name!r} is none of {', '.join(LOGGER_TYPE_TO_CLASS)}, all, none")
    if name != "tensorboard":  # the default
        raise ValueError(f"report_to={name!r}: {name} is not installed; install it, or pass --report_to none")
    logger.warning("tensorboard is not installed (pip install tensorboard): nothing is logged")
    return None


def claim_repository(config: DreamBoothConfig) -> str | None:
    """Make the repository that the model is pushed to, if it is; returns its name.

    Raises:
        ValueError: the hub refuses, or can't be reached.
    """
    if not config.push_to_hub:
        return None
    from huggingface_hub import create_repo

    try:
        name = config.hub_model_id or config.output_dir.resolve().name
        return str(create_repo(name, exist_ok=True, token=config.hub_token).repo_id)
    except Exception as error:
        told = " ".join(str(error).split())[:300]
        raise ValueError(f"push_to_hub: {type(error).__name__}: {told}; log in by `hf auth login`") from error
