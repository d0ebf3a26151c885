"""Loading a pipeline from whichever files are on disk or in the hub's cache."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import DiffusionPipeline


def load_pretrained(kind: Any, source: str, dtype: torch.dtype = torch.float32) -> Any:
    """Return `kind.from_pretrained(source)`, without the safety checker, from whichever files there are.

    The half-precision files ("fp16" variant) are taken first for a model in half precision, and otherwise
    where there are no others.

    Raises:
        OSError, ValueError: of diffusers, where neither can be loaded.
    """
    config = DiffusionPipeline.load_config(source)
    unused: dict[str, Any] = {}
    if "safety_checker" in config:
        unused = {"safety_checker": None, "requires_safety_checker": False}
    variants = ("fp16", None) if dtype == torch.float16 else (None, "fp16")
    errors: dict[str | None, Exception] = {}
    for variant in variants:
        try:
            pipe = kind.from_pretrained(source, dtype=dtype, variant=variant, **unused)
        except (OSError, ValueError) as error:
            errors[variant] = error
            continue
        if pipe.dtype != dtype:  # diffusers before 0.42 has another name for it
            pipe.to(dtype)
        return pipe
    raise errors[None]
