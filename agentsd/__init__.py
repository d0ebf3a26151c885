"""Stable Diffusion's U-Nets faster without training, in one line."""

from .attention import Agents, Downsample, Merge, PooledAgents, ResidualSharing
from .calibration import calibrate
from .patch import AgentHandle, apply_agentsd, remove_agentsd
from .recipe import Recipe
from .reuse import ReuseGuidance, ReuseSteps
from .schedule import ByDistance, Phases

__version__ = "0.1.0"

__all__ = [
    "AgentHandle",
    "Agents",
    "ByDistance",
    "Downsample",
    "Merge",
    "Phases",
    "PooledAgents",
    "Recipe",
    "ResidualSharing",
    "ReuseGuidance",
    "ReuseSteps",
    "apply_agentsd",
    "calibrate",
    "remove_agentsd",
]
