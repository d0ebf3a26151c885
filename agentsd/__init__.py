"""Stable Diffusion's U-Nets faster without training, in one line."""

from .attention import Agents, Downsample, Merge, PooledAgents, ResidualSharing
from .by_distance import ByDistance
from .cache import StepCache
from .handle import AgentSDHandle
from .patch import apply_agentsd, remove_agentsd
from .recipe import Recipe
from .schedule import Phases

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
