"""Which runs have calls to spare."""

from __future__ import annotations

from typing import Any

from ..hosts import keeps_nothing

FEWEST = 8
"""Steps of a run that anything is left out of."""
_CONSISTENCY = ("LCM", "TCD")
_NOISY = ("Ancestral", "SDE", "DDPM")


def why_whole(unet: Any, count: int, scheduler: Any) -> str:
    """Why nothing can be left out of a run of so many steps, or nothing."""
    if any(word in type(scheduler).__name__ for word in _CONSISTENCY):
        return f"{type(scheduler).__name__} is for few steps, none of which can be spared"
    if count < FEWEST:
        return f"a run of {count} steps has none to spare (fewer than {FEWEST})"
    for name, processor in unet.attn_processors.items():
        if not keeps_nothing(processor):
            kind = type(processor).__name__
            return f"{name} has a {kind}, which may have to see each call"
    return ""


def adds_noise(scheduler: Any) -> str:
    """The name of a sampler that adds noise in each step, or nothing."""
    name = type(scheduler).__name__
    algorithm = str(getattr(getattr(scheduler, "config", None), "algorithm_type", ""))
    noisy = any(word in name for word in _NOISY) or algorithm.startswith("sde")
    return name if noisy else ""
