"""Stable Diffusion's U-Nets faster without training, in one line."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .apply import AgentSDHandle, apply_agentsd, remove_agentsd
    from .attention import Agents, Downsample, Merge, PooledAgents
    from .attention.by_distance import ByDistance
    from .plan import ResidualSharing, StepCache
    from .recipe import Phases, Recipe

__version__ = "0.1.0"

__all__ = [
    "AgentSDHandle",
    "Agents",
    "ByDistance",
    "Downsample",
    "Merge",
    "Phases",
    "PooledAgents",
    "Recipe",
    "ResidualSharing",
    "StepCache",
    "apply_agentsd",
    "remove_agentsd",
]

_MODULES = {
    "apply": ("AgentSDHandle", "apply_agentsd", "remove_agentsd"),
    "attention": ("Agents", "Downsample", "Merge", "PooledAgents"),
    "attention.by_distance": ("ByDistance",),
    "plan": ("ResidualSharing", "StepCache"),
    "recipe": ("Phases", "Recipe"),
}
"""Where each name is. Imported when asked for: commands refuse wrong options before torch is loaded."""
_ELSEWHERE = {"apply_patch": "apply_agentsd(pipe)", "remove_patch": "remove_agentsd(pipe)"}
"""What tomesd and the authors' code, a package of the same name, call it, and what it is here."""


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f".{module}", __name__), name)
    way_out = f": call agentsd.{_ELSEWHERE[name]}" if name in _ELSEWHERE else ""
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{way_out}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
