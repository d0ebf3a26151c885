"""Trainable attention modules: (query, key, value, height, width) -> (B, heads, N, d), linear in N."""

from .agent import AgentAttention, AgentBias, biased_agent_attention
from .attnzero import AttnZeroAttention, attnzero_attention
from .focused import FocusedLinearAttention, focused_attention, focused_map
from .operators import AgentModule, AttnZero, FocusedLinear, TrainedOperator

__all__ = [
    "AgentAttention",
    "AgentBias",
    "AgentModule",
    "AttnZero",
    "AttnZeroAttention",
    "FocusedLinear",
    "FocusedLinearAttention",
    "TrainedOperator",
    "attnzero_attention",
    "biased_agent_attention",
    "focused_attention",
    "focused_map",
]
