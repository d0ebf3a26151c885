"""Agent attention for Stable Diffusion on diffusers, without training."""

from .calibrate import calibrate
from .config import AgentConfig
from .layers import LayerConfigs
from .patch import AgentHandle, apply_agentsd, remove_agentsd

__all__ = ["AgentConfig", "AgentHandle", "LayerConfigs", "apply_agentsd", "calibrate", "remove_agentsd"]
