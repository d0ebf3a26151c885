"""The self-attention processor: project, merge, attend, unmerge; else call the processor that it wraps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from diffusers.models.attention_processor import Attention, AttnProcessor2_0
from torch import Tensor
from torch.nn import Module

from .adapter import CORE
from .attention import agent_attention
from .config import AgentConfig
from .merging import Cut, merge, unmerge
from .plan import AGENT, STOCK, Group
from .pooling import pool_tokens

_SEPARATE = AttnProcessor2_0()  # for layers whose own processor has its projections fused


@dataclass
class LayerState:
    """What a patched attention layer knows; kept on the layer, not on its processor.

    Attributes:
        name: the layer's name in the model.
        group: what it and the layers that share its ranking do in the call under way.
        held: whether the layer's processor is ours.
        block_input: (B, N, C) the block's input before `norm1`, from which tokens are ranked.
        mismatch: the number of tokens that came instead of the expected one, or 0.
        wrapped_type: what a host's copy of the layer's processor must wrap.
    """

    name: str
    group: Group
    held: bool = True
    block_input: Tensor | None = None
    mismatch: int = 0
    wrapped_type: type = AttnProcessor2_0

    def see(self, norm1: Module, args: tuple[Tensor, ...]) -> None:
        """Forward pre-hook of the block's `norm1`: note the block's input, if it will be ranked."""
        if self.held and self.group.phase != STOCK and self.group.cuts is None:
            self.block_input = args[0]

    def merge_feed_forward(self, norm3: Module, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
        """Forward hook of the block's `norm3`: what the feed-forward layer gets in early steps (ToMeSD)."""
        return out if self._feed_forward_cut is None else merge(out, self._feed_forward_cut)

    def unmerge_feed_forward(self, ff: Module, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
        """Forward hook of the block's `ff`: the way back."""
        return out if self._feed_forward_cut is None else unmerge(out, self._feed_forward_cut)

    @property
    def _feed_forward_cut(self) -> Cut | None:
        cuts = self.group.cuts
        return cuts.tokens if self.group.phase == AGENT and self.held and cuts is not None else None


class AgentAttnProcessor:
    """Agent attention, token merging or downsampling around the processor that was there before.

    All state is the layer's (`LayerState`), so that a copy which a host makes by `type(processor)()`
    works as long as agentsd is applied, and is plain attention when it is not.
    """

    def __init__(self, wrapped: Any = None) -> None:
        self.is_copy = wrapped is None
        self.wrapped = AttnProcessor2_0() if wrapped is None else wrapped

    def __call__(
        self,
        attn: Attention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """Self-attention on `hidden_states` (B, N, C) -> (B, N, C); else `wrapped` is called."""
        layer: LayerState | None = getattr(attn, "_agentsd", None)
        plain = encoder_hidden_states is None and attention_mask is None and hidden_states.ndim == 3
        if layer is None or layer.group.phase == STOCK or not plain:
            return self.wrapped(attn, hidden_states, encoder_hidden_states, attention_mask, *args, **kwargs)

        group, block_input, layer.block_input = layer.group, layer.block_input, None
        fits = hidden_states.shape[1] == group.tokens
        if fits and group.cuts is None and block_input is not None:
            group.cuts = group.cut(block_input)
        cuts = group.cuts
        if not fits or cuts is None:
            layer.mismatch = hidden_states.shape[1]
            return self.wrapped(attn, hidden_states, None, None, *args, **kwargs)

        core = getattr(attn, CORE, None)
        if core is not None and group.phase == AGENT:
            return _attend_with(core, attn, hidden_states, *group.grid)
        tokens = merge(hidden_states, cuts.tokens) if cuts.tokens else hidden_states
        if cuts.agents:
            out = _attend(attn, tokens, merge(hidden_states, cuts.agents), group.config)
        elif group.kept is not None:
            attend = _SEPARATE if attn.fused_projections else self.wrapped
            out = attend(attn, tokens, tokens.index_select(1, group.kept), None, *args, **kwargs)
        elif group.pool:
            # Averages of tokens, projected, are averages of queries.
            out = _attend(attn, tokens, pool_tokens(hidden_states, group.pool), group.config, group.pool.mask)
        else:
            out = self.wrapped(attn, tokens, None, None, *args, **kwargs)
        if group.config.mode == "exact" and group.partition is not None:
            group.cuts = None  # this layer's alone, and large where tokens are many
        return unmerge(out, cuts.tokens) if cuts.tokens else out


def _attend(
    attn: Attention, tokens: Tensor, agents: Tensor, config: AgentConfig, mask: Tensor | None = None
) -> Tensor:
    """The layer's own projections and norms around `agent_attention`: (B, M, C) -> (B, M, C)."""
    query, key, value = _project(attn, tokens)
    agent = _heads(attn, attn.to_q(agents))
    if attn.norm_q is not None:
        agent = attn.norm_q(agent)
    dtype = value.dtype
    if attn.upcast_attention or attn.upcast_softmax:
        query, key, value, agent = (x.float() for x in (query, key, value, agent))
    out = agent_attention(query, key, value, agent, config.k, config.scale, mask)
    return _project_out(attn, out.to(dtype))


def _attend_with(core: Any, attn: Attention, tokens: Tensor, height: int, width: int) -> Tensor:
    """The layer's own projections and norms around a trainable module: (B, N, C) -> (B, N, C)."""
    return _project_out(attn, core(*_project(attn, tokens), height, width))


def _project(attn: Attention, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value (B, heads, M, d) of tokens (B, M, C)."""
    query, key, value = (_heads(attn, to(tokens)) for to in (attn.to_q, attn.to_k, attn.to_v))
    if attn.norm_q is not None:
        query = attn.norm_q(query)
    if attn.norm_k is not None:
        key = attn.norm_k(key)
    return query, key, value


def _project_out(attn: Attention, out: Tensor) -> Tensor:
    out = out.transpose(1, 2).flatten(2)
    out = attn.to_out[1](attn.to_out[0](out))  # linear, dropout
    return out / attn.rescale_output_factor


def _heads(attn: Attention, x: Tensor) -> Tensor:
    return x.unflatten(2, (attn.heads, -1)).transpose(1, 2)
