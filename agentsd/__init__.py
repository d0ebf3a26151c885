"""Stable Diffusion's U-Nets faster without training, in one line."""

from typing import NoReturn

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

_ELSEWHERE = {"apply_patch": "apply_agentsd(pipe)", "remove_patch": "remove_agentsd(pipe)"}
"""What tomesd and the authors' code, a package of the same name, call it, and what it is here."""


def __getattr__(name: str) -> NoReturn:
    way_out = f": call agentsd.{_ELSEWHERE[name]}" if name in _ELSEWHERE else ""
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{way_out}")
