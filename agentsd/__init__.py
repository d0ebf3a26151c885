"""Stable Diffusion's U-Nets faster without training, in one line."""

from .attention import Agents, Downsample, Merge, PooledAgents, ResidualSharing
from .cache import GuidanceCache, StepCache
from .calibration import calibrate
from .patch import AgentSDHandle, apply_agentsd, remove_agentsd
from .recipe import Recipe
from .schedule import ByDistance, Phases

__version__ = "0.1.0"

__all__ = [
    "AgentSDHandle",
    "Agents",
    "ByDistance",
    "Downsample",
    "GuidanceCache",
    "Merge",
    "Phases",
    "PooledAgents",
    "Recipe",
    "ResidualSharing",
    "StepCache",
    "apply_agentsd",
    "calibrate",
    "remove_agentsd",
]
