"""What a run would stumble over, told before anything is loaded, drawn or written."""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path

import torch
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

from .checkpoints import check_settings, find_checkpoint, list_checkpoints
from .config import DreamBoothConfig
from .data import find_images, image_paths

logger = logging.getLogger(__name__)


def check_files(config: DreamBoothConfig) -> tuple[list[Path], Path | None]:
    """The subject's images, and the checkpoint to go on from; the output folder is made.

    Raises:
        ValueError, OSError: a folder is missing, empty, broken or in use; or the checkpoint is another run's.
    """
    instance, classes = find_images(config.instance_data_dir), config.class_data_dir
    if config.with_prior_preservation and classes is not None and classes.exists():
        if not classes.is_dir():
            raise ValueError(f"class_data_dir={str(classes)!r} is no folder: choose another")
        if image_paths(classes):
            find_images(classes)
    source = Path(config.pretrained_model_name_or_path)
    if str(source) != "demo" and source.is_dir() and not (source / "model_index.json").is_file():
        raise ValueError(f"{source} has no model_index.json: give the folder of a diffusers pipeline")
    folder, resume = config.output_dir, None
    folder.mkdir(parents=True, exist_ok=True)
    logs = config.logging_dir.parts[:1]
    there = sorted(path.name for path in folder.iterdir() if path.name[0] != "." and path.name not in logs)
    if there and (config.resume_from_checkpoint is None or not list_checkpoints(folder)):
        raise ValueError(
            f"output_dir={str(folder)!r} holds {there[0]}, which the run might overwrite: choose another "
            "folder, or go on with a run's checkpoints by --resume_from_checkpoint latest"
        )
    if config.resume_from_checkpoint is not None:
        resume = find_checkpoint(folder, config.resume_from_checkpoint)
    if resume is not None:
        check_settings(resume, config)
    return instance, resume


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
