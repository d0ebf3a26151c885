"""Load and export the embedded pipeline."""

import json
import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import diffusers.utils.logging
import torch
import transformers.utils.logging

from .data import PIPELINE

if TYPE_CHECKING:
    from diffusers import StableDiffusionPipeline


SHARD = "15MB"
"""The largest file of weights."""


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence loading bars and advice (both libraries report only through their own switches)."""
    libraries = (diffusers.utils.logging, transformers.utils.logging)
    before = [library.get_verbosity() for library in libraries]
    bars = [library.is_progress_bar_enabled() for library in libraries]
    for library in libraries:
        library.set_verbosity(logging.ERROR)
        library.disable_progress_bar()
    try:
        yield
    finally:
        for library, verbosity, bar in zip(libraries, before, bars, strict=True):
            library.set_verbosity(verbosity)
            if bar:
                library.enable_progress_bar()


def load_pipeline(
    dtype: torch.dtype = torch.float32,
    device: str | torch.device | None = None,
    folder: Path = PIPELINE,
) -> "StableDiffusionPipeline":
    """Return the bundled toy model as an ordinary pipeline: 128x128 pixels, a latent of 4x32x32, PLMS.

    Nothing is downloaded. `folder` may be another export of the same recipe; one that holds no pipeline
    raises FileNotFoundError.
    """
    if not (folder / "model_index.json").exists():
        raise FileNotFoundError(
            f"no exported pipeline in {folder}; make one with `python -m agentsd_demo.training.train`"
        )
    with _quiet():
        # Imported here, as its import alone gives advice about torchvision.
        from diffusers import StableDiffusionPipeline

        pipe: Any = StableDiffusionPipeline.from_pretrained(
            folder, dtype=dtype, safety_checker=None, requires_safety_checker=False, local_files_only=True
        )
    return pipe if device is None else pipe.to(device)


def check_export(folder: Path) -> None:
    """Raise ValueError where an export would replace a folder that is no export."""
    if folder.exists() and not (folder / "training.json").exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is no exported pipeline and stays as it is: choose another export_dir")


def export_pipeline(pipe: Any, folder: Path, training: dict[str, Any]) -> None:
    """Write a pipeline in half precision, and `training.json` with what it was trained on.

    An export that the folder held before is replaced once all is written. Raises ValueError for another one.
    """
    check_export(folder)
    target, folder = folder, folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(folder, ignore_errors=True)
    pipe.save_pretrained(folder)
    pipe.tokenizer.backend_tokenizer.model.save(str(folder / "tokenizer"))  # for transformers 4
    for name in ("unet", "vae", "text_encoder"):
        half = type(getattr(pipe, name)).from_pretrained(folder / name, dtype=torch.float16)
        shutil.rmtree(folder / name)
        half.save_pretrained(folder / name, max_shard_size=SHARD)
    for config in (folder / "model_index.json", *folder.glob("*/config.json")):
        settings = json.loads(config.read_text(encoding="utf-8"))
        settings.pop("_name_or_path", None)  # a folder of the machine that made it
        config.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    (folder / "training.json").write_text(json.dumps(training, indent=1) + "\n", encoding="utf-8")
    shutil.rmtree(target, ignore_errors=True)
    folder.rename(target)
