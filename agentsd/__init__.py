"""Stable Diffusion's U-Nets faster without training, in one line."""

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
