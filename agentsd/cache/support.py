"""Which runs have steps to spare."""

from __future__ import annotations

from typing import Any

from ..hosts.models import foreign_cache, keeps_nothing
from ..hosts.schedulers import Sampler

FEWEST = 8
"""Steps of a run in which anything is skipped."""


def unsupported_reason(unet: Any, count: int, sampler: Sampler) -> str:
    """Why nothing can be skipped in a run of so many steps, or nothing."""
    if sampler.for_few_steps:
        return f"{sampler.name} is for few steps, none of which can be spared"
    if count < FEWEST:
        return f"a run of {count} steps has none to spare (fewer than {FEWEST})"
    for name, processor in unet.attn_processors.items():
        if not keeps_nothing(processor):
            kind = type(processor).__name__
            return f"{name} has a {kind}, which may have to see each call"
    if other := foreign_cache(unet):
        return f"{other}, which skips layers itself: switch one of the two off"
    return ""
