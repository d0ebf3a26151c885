"""DreamBooth finetuning with agent attention in every step (Agent Attention, appendix B.4)."""

from .config import DreamBoothConfig

__all__ = ["DreamBoothConfig"]
