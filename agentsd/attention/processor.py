"""What self-attention layers run in a call: a plan for each group of layers, a processor for each layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from diffusers.models.attention_processor import Attention, AttnProcessor2_0
from torch import Tensor
from torch.nn import Module

from ..hosts import AttentionLayer
from ..plan import FULL, KEEP, OPERATOR, SHARE, Call
from .operator import GridContext, Operator, Plan

_SEPARATE = AttnProcessor2_0()  # for layers whose own processor has its projections fused


Plans: TypeAlias = dict[int, Plan | None]
"""The plans of a call by level, which its groups share."""


@dataclass(eq=False)
class Group:
    """Layers on one token grid that share a plan: all of a level, or a single layer.

    Attributes:
        grid: returns height and width in tokens for a latent (..., H, W).
        index: the number of the first layer; it seeds random destinations.
        stages: the operator of each stage of a run.
        downsampling_factor: width of a token, in tokens of the finest patched level.
        seed: seed of the random destinations.
        skipped: whether a cached call skips all of the layers.
        images, tokens: how many the layers should get in the current call; video frames count as images.
        plan: the plan of the current call; None is full attention.
    """

    grid: Callable[[Tensor], tuple[int, int]]
    index: int
    stages: tuple[Operator | None, ...]
    downsampling_factor: int
    seed: int
    skipped: bool = False
    images: int = 0
    tokens: int = 0
    plan: Plan | None = None

    def make_plan(self, call: Call, grid: tuple[int, int], shared: Plans) -> Plan | None:
        """Return the plan of a call.

        Args:
            call: the call.
            grid: height and width in tokens.
            shared: the call's plans by level, for operators that rank once for a whole level.
        """
        operator = self.stages[call.stage if len(self.stages) > 1 else 0]
        if operator is None:
            return None
        level = self.downsampling_factor
        if operator.own_ranking or level not in shared:
            key = (self.seed, self.index, call.timestep)
            plan = operator.plan(GridContext(grid, level, call.latent.device, key))
            if operator.own_ranking:
                return plan
            shared[level] = plan
        return shared[level]


@dataclass(eq=False)
class AgentAttnProcessor:
    """Replaces a layer's own processor during a call. Between calls the layer has its own.

    Attributes:
        layer: the layer.
        fallback: the layer's own processor.
        group: the group of layers that share a plan.
        module: the layer's trained module, if it has one.
        held: whether this processor is in the layer now.
        skipped: whether a cached call skips the layer.
        attention: what it computes in the current call (`agentsd.plan`).
        residual: (B, N, C) the residual to add to the operator's output, or the one that was computed.
        block_input: (B, N, C) the block's input before `norm1`, by which tokens are ranked.
        mismatch: the numbers of images and tokens that came, if others were expected.
        beside: what came besides tokens, in words. Then the layer's own attention runs.
        compiled: whether the residual was computed in a compiled graph.
    """

    layer: AttentionLayer
    fallback: Any
    group: Group
    module: Module | None = None
    held: bool = False
    skipped: bool = False
    attention: str = OPERATOR
    residual: Tensor | None = None
    block_input: Tensor | None = None
    mismatch: tuple[int, int] | None = None
    beside: str = ""
    compiled: bool = False

    def note_input(self, norm1: Module, args: tuple[Tensor, ...]) -> None:
        """Forward pre-hook of the block's `norm1`: remember the block's input if tokens will be ranked."""
        plan = self.group.plan
        if self.held and plan is not None and plan.ranks and self.attention != FULL:
            self.block_input = args[0]

    def __call__(
        self,
        attn: Attention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """Return self-attention on `hidden_states` (B, N, C); anything else goes to `fallback`."""
        plan, (block_input, self.block_input) = self.group.plan, (self.block_input, None)
        plain = encoder_hidden_states is None and attention_mask is None and hidden_states.ndim == 3
        if plan is not None and self.attention != FULL and not plain:
            other = "an attention mask", "other tokens to attend to, or an image in place of tokens"
            self.beside = other[attention_mask is None]
        if plan is None or self.attention == FULL or not plain:
            return self.fallback(attn, hidden_states, encoder_hidden_states, attention_mask, *args, **kwargs)

        came = hidden_states.shape[0], hidden_states.shape[1]
        # Maps and residuals don't fit a part of the images or other tokens (a video in chunks).
        fits = came == (self.group.images, self.group.tokens)
        if fits and plan.ranks and block_input is not None:
            plan.rank(block_input)
        if not fits or plan.ranks:
            self.mismatch = came
            return self.fallback(attn, hidden_states, None, None, *args, **kwargs)

        def attend(tokens: Tensor, context: Tensor | None = None) -> Tensor:
            if context is not None and attn.fused_projections:  # these would take keys from `tokens`
                return _SEPARATE(attn, tokens, context)
            return self.fallback(attn, tokens, context, None, *args, **kwargs)

        if self.attention == KEEP:
            full = attend(hidden_states)
            self.residual = full - plan.attend(attn, hidden_states, attend)
            self.compiled = torch.compiler.is_compiling()
            return full
        out = plan.attend(attn, hidden_states, attend)
        if self.attention == SHARE and self.residual is not None:
            out = out + self.residual
        return out
