"""A pipeline from its files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline


def load_pretrained(
    kind: Any,
    source: str,
    dtype: torch.dtype = torch.float32,
    variant: str | None = None,
    revision: str | None = None,
) -> Any:
    """Return `kind.from_pretrained(source)`, without the safety checker, from whichever files there are.

    Without `variant` the half-precision files ("fp16") are taken first for a model in half precision, and
    otherwise where there are no others.

    Raises:
        OSError, ValueError: of diffusers, where neither can be loaded.
    """
    config = load_index(source, revision)
    unused: dict[str, Any] = {}
    if "safety_checker" in config:
        unused = {"safety_checker": None, "requires_safety_checker": False}
    errors: list[Exception] = []
    for one in [variant] if variant else _variants(source, dtype):
        try:
            pipe = kind.from_pretrained(source, dtype=dtype, variant=one, revision=revision, **unused)
        except (OSError, ValueError) as error:
            errors.append(error)
            continue
        if pipe.dtype != dtype:  # diffusers before 0.42 has another name for it
            pipe.to(dtype)
        return pipe
    raise errors[0]


def load_index(source: str, revision: str | None = None) -> Any:
    """Return what a pipeline's model_index.json holds; raises OSError where there is none to be had."""
    try:
        return DiffusionPipeline.load_config(source, revision=revision)
    except OSError as error:
        told = "can't be reached, needs `hf auth login`, or is no diffusers model"
        raise OSError(f"{source} {told}") from error


def _variants(source: str, dtype: torch.dtype) -> list[str | None]:
    """Return the kinds of files to try; of a folder those that it holds."""
    order: list[str | None] = ["fp16", None] if dtype == torch.float16 else [None, "fp16"]
    if not Path(source).is_dir():
        return order
    files = [path for path in Path(source).glob("*/*") if path.suffix in (".safetensors", ".bin")]
    held = {"fp16" if ".fp16" in path.suffixes else None for path in files}
    return [variant for variant in order if variant in held] or [None]
