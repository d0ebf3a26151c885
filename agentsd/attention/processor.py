"""The self-attention processor: what the layer's plan says, else the processor that it stands in for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from diffusers.models import attention_processor
from diffusers.models.attention_processor import Attention, AttnProcessor2_0
from torch import Tensor
from torch.nn import Module

from ..plan import FULL, KEEP, OPERATOR, SHARE
from .operator import Plan


@dataclass
class Work:
    """What the layers of a group do in the call under way.

    Attributes:
        grid: height and width in tokens that they are expected to get.
        images: how many images they are expected to get, a video's frames among them.
        plan: of the operator that runs; None is full attention.
    """

    grid: tuple[int, int] = (0, 0)
    images: int = 0
    plan: Plan | None = None

    @property
    def tokens(self) -> int:
        """How many tokens the layers are expected to get."""
        return self.grid[0] * self.grid[1]


@dataclass
class LayerState:
    """What a patched attention layer knows; kept on the layer, not on its processor.

    Attributes:
        name: the layer's name in the model.
        work: what it and the layers that share its ranking do in the call under way.
        held: whether the layer's processor is ours.
        attention: what it computes in the call under way (`residual.py`).
        residual: (B, N, C) what is added to the operator's output, or what was found to be missing in it.
        block_input: (B, N, C) the block's input before `norm1`, from which tokens are ranked.
        mismatch: how many images and tokens came instead of the expected ones.
        compiled: the residual that was found is what a compiled graph gave.
    """

    name: str
    work: Work = field(default_factory=Work)
    held: bool = True
    attention: str = OPERATOR
    residual: Tensor | None = None
    block_input: Tensor | None = None
    mismatch: tuple[int, int] | None = None
    compiled: bool = False

    def note_input(self, norm1: Module, args: tuple[Tensor, ...]) -> None:
        """Forward pre-hook of the block's `norm1`: note the block's input, if it will be ranked."""
        plan = self.work.plan
        if self.held and plan is not None and plan.ranks and self.attention != FULL:
            self.block_input = args[0]


class AgentAttnProcessor:
    """Stands in for the processor that was there before, and says it is of its class.

    Hosts choose by `processor.__class__`, so that they treat the layer as they would without the patch.
    All state is the layer's (`LayerState`).
    """

    def __init__(self, fallback: Any = None) -> None:
        self.fallback = AttnProcessor2_0() if fallback is None else fallback

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        kind = type(self.fallback)
        # A module would be registered as one, and walked. A plain one of another package has diffusers' name.
        return getattr(attention_processor, kind.__name__) if issubclass(kind, Module) else kind

    def __reduce__(self) -> tuple[Any, ...]:
        return AgentAttnProcessor, (self.fallback,)

    def __call__(
        self,
        attn: Attention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """Self-attention on `hidden_states` (B, N, C) -> (B, N, C); else `fallback` is called."""
        layer: LayerState | None = getattr(attn, "_agentsd", None)
        plan = None if layer is None else layer.work.plan
        plain = encoder_hidden_states is None and attention_mask is None and hidden_states.ndim == 3
        if layer is None or plan is None or not plain or layer.attention == FULL:
            return self.fallback(attn, hidden_states, encoder_hidden_states, attention_mask, *args, **kwargs)

        block_input, layer.block_input = layer.block_input, None
        came = hidden_states.shape[0], hidden_states.shape[1]
        # Of a part of the images, or of other tokens, maps and residuals are not (a video in chunks).
        fits = came == (layer.work.images, layer.work.tokens)
        if fits and plan.ranks and block_input is not None:
            plan.rank(block_input)
        if not fits or plan.ranks:
            layer.mismatch = came
            return self.fallback(attn, hidden_states, None, None, *args, **kwargs)

        def fallback(tokens: Tensor, context: Tensor | None = None, *more: Any) -> Tensor:
            return self.fallback(attn, tokens, context, None, *args, **kwargs)

        if layer.attention == KEEP:
            full = fallback(hidden_states)
            layer.residual = full - plan.attend(attn, hidden_states, fallback)
            layer.compiled = torch.compiler.is_compiling()
            return full
        out = plan.attend(attn, hidden_states, fallback)
        if layer.attention == SHARE and layer.residual is not None:
            out = out + layer.residual
        return out


def is_ours(processor: Any) -> bool:
    """Whether a processor is an `AgentAttnProcessor`, whatever it says it is."""
    return type(processor) is AgentAttnProcessor
