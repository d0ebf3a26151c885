"""What a run of hours needs, looked at before its first image: settings, disk, memory."""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import psutil
import torch

from ..cost.memory import PipelineMemory, growth, pipeline_memory
from ..environment import device_name
from ..errors import EvalError
from ..images.methods import Method
from ..images.prompts import ImageSpec, specs_of
from ..images.sampling import sample
from ..images.store import Store
from ..quality.features import pytorch_fid
from ..settings import RunSettings, processes

_PNG = 1.8  # bytes a pixel of a photograph takes as PNG
_PERCEPTUAL = 0.7e6  # bytes of an image's stage features
_TIMED = 4  # steps that are timed to tell how long a run takes
_REST = 1e9  # bytes of everything that doesn't grow with the images


def check_settings(settings: RunSettings) -> None:
    """Raise EvalError for settings that leave the table without a FID."""
    if settings.features == "inception" and settings.model != "demo" and settings.reference is None:
        raise EvalError(
            "features = inception without a reference: there would be no FID; give --reference "
            "FOLDER_OF_REAL_IMAGES, or --features efficientnet-lite0 for a table without real images"
        )
    if settings.features == "inception":
        pytorch_fid()


def missing_images(store: Store, method: Method, count: int) -> int:
    """Return how many of a method's images are still to be made."""
    return max(0, count - len(list(store.path(method, 0).parent.glob("*.png"))))


def check_disk(store: Store, methods: Sequence[Method], count: int, height: int, width: int) -> None:
    """Raise EvalError if the images that are still to be made, `count` a method, won't fit on the disk."""
    missing = sum(missing_images(store, method, count) for method in methods)
    needed, free = missing * height * width * _PNG, shutil.disk_usage(store.folder).free
    if needed > free:
        raise EvalError(
            f"{store.folder}: {missing:,} images of {width}x{height} need about {needed / 1e9:,.1f} GB, and "
            f"{free / 1e9:,.1f} GB are free; make room, choose another --out or try fewer with --limit"
        )


def forecast(
    pipe: Any, store: Store, methods: Sequence[Method], specs: Sequence[ImageSpec], settings: RunSettings
) -> str:
    """Return how long the missing images take at most: as if each step were the baseline's, and computed."""
    missing = {method: missing_images(store, method, len(specs)) for method in methods}
    if not any(missing.values()):
        return ""
    sample(pipe, replace(methods[0], steps=1), specs[:1], settings)  # to warm up
    step = sample(pipe, replace(methods[0], steps=_TIMED), specs[:1], settings)[1].wall / _TIMED

    def seconds(images: Mapping[Method, int]) -> float:
        return sum(n * (m.steps or settings.steps) * step for m, n in images.items()) / processes()

    device = f"{device_name(pipe._execution_device)} (threads: {torch.get_num_threads()})"
    minutes = f"about {seconds(missing) / 60:.0f} min at most"
    told = f"{sum(missing.values()):,} images, {minutes}, on {device}; they go to {settings.out}"
    if settings.limit is None:
        return told
    whole = len(specs_of(settings.model_copy(update={"limit": None})))
    hours = seconds(dict.fromkeys(methods, whole)) / 3600
    return f"{told}. Without --limit: {whole * len(methods):,} images, about {hours:,.1f} h"


def check_memory(count: int, compared: int) -> None:
    """Raise EvalError if `count` images a row can't be measured in this machine's memory.

    `compared` are the rows whose features are held at once.
    """
    needed, free = (
        count * _PERCEPTUAL * compared + 4 * 8 * count**2 + _REST,
        psutil.virtual_memory().available,
    )
    if needed > free:
        raise EvalError(
            f"measuring {count:,} images a row needs about {needed / 1e9:,.1f} GB of memory, and "
            f"{free / 1e9:,.1f} GB are free; take fewer images (--limit N tries it)"
        )


def measure_memory(
    pipe: Any, method: Method, specs: Sequence[ImageSpec], settings: RunSettings
) -> PipelineMemory | None:
    """Return a method's GPU memory by runs of one and of two images; None on a CPU, or if two don't fit.

    Raises EvalError if the run's batches won't fit.
    """

    def call(count: int) -> None:
        wanted = [specs[i % len(specs)] for i in range(count)]
        sample(pipe, method, wanted, settings)

    try:
        found = pipeline_memory(pipe, call)
    except torch.OutOfMemoryError as error:
        torch.cuda.empty_cache()
        if settings.batch_size > 1:
            raise EvalError(
                f"{method.label}: this GPU's memory doesn't do for 2 images at once; --batch-size 1, a "
                "smaller --height and --width, or --dtype float16 need less"
            ) from error
        return None
    if found is None:
        return None
    total = torch.cuda.get_device_properties(pipe._execution_device).total_memory / 1e9
    if (needed := found.needed(settings.batch_size)) > total:
        fits = 1 + int((total - found.total[0]) / max(growth(found.total), 1e-3))
        raise EvalError(
            f"{method.label}: batches of {settings.batch_size} need about {needed:.1f} GB, and this GPU has "
            f"{total:.1f} GB; take --batch-size {max(1, fits)}"
        )
    return found
