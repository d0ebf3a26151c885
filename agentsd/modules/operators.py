"""Trained modules as operators: all tokens of a layer go through a module of its own."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from diffusers.models.attention_processor import Attention
from torch import Tensor
from torch.nn import Module

from ..attention.agents import check_formula
from ..attention.operator import MODULE, Attend, GridContext, Operator, Plan, project, project_out
from ..attention.ranking import check_stride
from ..checks import check
from .agent import AgentAttention
from .attnzero import AttnZeroAttention
from .focused import FocusedLinearAttention


class TrainedOperator(Operator):
    """An operator with weights of its own in each layer."""

    needs_module: ClassVar[bool] = True

    def build(self, heads: int, head_dim: int, grid: tuple[int, int]) -> Module:
        """An untrained module for the token grid of the model's own size.

        It is built without weights (on the meta device), and its `reset(generator)` draws them.
        """
        raise NotImplementedError

    def plan(self, context: GridContext) -> ModulePlan:
        """The module takes any grid."""
        return ModulePlan(*context.grid)


class ModulePlan(Plan):
    """The token grid that a module gets."""

    def __init__(self, height: int, width: int) -> None:
        self.height, self.width = height, width

    def attend(self, attn: Attention, tokens: Tensor, fallback: Attend) -> Tensor:
        """The layer's own projections and norms around its module."""
        return project_out(attn, getattr(attn, MODULE)(*project(attn, tokens), self.height, self.width))


@dataclass(frozen=True)
class AgentModule(TrainedOperator):
    """`AgentAttention` (Agent Attention, Eq. 6), which starts as `PooledAgents` on all tokens.

    Attributes:
        bias, convolution: leave one out for an ablation (Table 6).
        count: how many agents, at most; None takes one for each cell of `stride`.
        k, scale, stride: see `Agents`.
    """

    name: ClassVar[str] = "agent_module"

    bias: bool = True
    convolution: bool = True
    count: int | None = None
    k: float = 0.075
    scale: float = -0.15
    stride: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        check("count", self.count, self.count is None or self.count >= 1, "pass 1 or more, or None")
        check_formula(self.k, self.scale)
        check_stride(self.stride)

    def build(self, heads: int, head_dim: int, grid: tuple[int, int]) -> Module:
        """An `AgentAttention` of so many agents."""
        agents = self.count or max(1, math.prod(side // self.stride for side in grid))
        parts = {"bias": self.bias, "convolution": self.convolution}
        return AgentAttention(heads, head_dim, grid=grid, agents=agents, scale=self.scale, k=self.k, **parts)


@dataclass(frozen=True)
class FocusedLinear(TrainedOperator):
    """`FocusedLinearAttention` (FLatten, Eq. 12).

    Attributes:
        convolution: leave it out for an ablation (Table 4).
    """

    name: ClassVar[str] = "focused_linear"

    convolution: bool = True

    def build(self, heads: int, head_dim: int, grid: tuple[int, int]) -> Module:
        """A `FocusedLinearAttention`."""
        return FocusedLinearAttention(heads, head_dim, convolution=self.convolution)


@dataclass(frozen=True)
class AttnZero(TrainedOperator):
    """`AttnZeroAttention`, which has no weights of its own: the projections are what is trained."""

    name: ClassVar[str] = "attnzero"

    def build(self, heads: int, head_dim: int, grid: tuple[int, int]) -> Module:
        """An `AttnZeroAttention`."""
        return AttnZeroAttention(heads, head_dim)
