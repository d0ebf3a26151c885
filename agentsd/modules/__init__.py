"""Trainable attention cores: (query, key, value, height, width) -> (B, heads, N, d), linear in N."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..pooling import agent_grid, pool_agents
from .agent import AgentAttention, AgentBias, biased_agent_attention
from .attnzero import AttnZeroAttention, attnzero_attention
from .focused import FocusedLinearAttention, focused_attention, focused_map

__all__ = [
    "CORES",
    "AgentAttention",
    "AgentBias",
    "AttnZeroAttention",
    "FocusedLinearAttention",
    "agent_grid",
    "attnzero_attention",
    "biased_agent_attention",
    "build_core",
    "focused_attention",
    "focused_map",
    "pool_agents",
]

CORES: dict[str, type[nn.Module]] = {
    "agent": AgentAttention,
    "focused": FocusedLinearAttention,
    "attnzero": AttnZeroAttention,
}


def build_core(kind: str, heads: int, head_dim: int, **settings: Any) -> nn.Module:
    """The core named `kind`, a key of `CORES`, with that class's own settings."""
    if kind not in CORES:
        raise ValueError(f"kind={kind!r}: choose one of {', '.join(CORES)}")
    return CORES[kind](heads, head_dim, **settings)
