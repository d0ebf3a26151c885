"""Which runs have steps to spare."""

from __future__ import annotations

from typing import Any

from ..hosts.foreign import foreign_inside
from ..sampler import is_for_few_steps

FEWEST = 8
"""Steps of a run in which anything is skipped."""


def unsupported_reason(unet: Any, count: int, scheduler: Any) -> str:
    """Why nothing can be skipped in a run of so many steps, or nothing."""
    if is_for_few_steps(scheduler):
        return f"{type(scheduler).__name__} is for few steps, none of which can be spared"
    if count < FEWEST:
        return f"a run of {count} steps has none to spare (fewer than {FEWEST})"
    if other := foreign_inside(unet):
        return f"{other}, which may have to see each call"
    return ""
