"""What an operator of self-attention is: settings, and the plan that they make for a call."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from diffusers.models.attention_processor import Attention
from torch import Tensor

from ..checks import check_types

MODULE = "agentsd_module"
"""Name of a layer's trainable module, where it has one."""

Attend = Callable[..., Tensor]
"""What would have run without the patch: (hidden_states, context) -> output; no context is self-attention."""


@dataclass(frozen=True)
class GridContext:
    """Where an operator runs in a call.

    Attributes:
        grid: height and width in tokens.
        downsampling_factor: side of a token, in tokens of the finest patched level.
        device: where index tensors go.
        key: (seed, number of the group of layers, timestep) of what is drawn at random.
    """

    grid: tuple[int, int]
    downsampling_factor: int
    device: Any
    key: tuple[int, int, float]

    @property
    def tokens(self) -> int:
        """How many tokens an image has."""
        return self.grid[0] * self.grid[1]

    def stride(self, least: int, at_most: int | None) -> int:
        """The side of square cells, `least` or more, so that there are about `at_most` of them or fewer."""
        if at_most is None:
            return least
        return max(least, math.ceil(math.sqrt(self.tokens / at_most)))


class Plan:
    """What an operator does in the layers of a group in one call.

    Attributes:
        ranks: whether `rank` is to be called before `attend`.
    """

    ranks: bool = False

    def rank(self, block_input: Tensor) -> None:
        """Take in a block's input (B, N, C) before `norm1`."""

    def hold(self) -> None:
        """Keep the map of tokens beyond a layer's own call: others will use the plan."""

    def attend(self, attn: Attention, tokens: Tensor, fallback: Attend) -> Tensor:
        """Self-attention of a layer on (B, N, C)."""
        raise NotImplementedError


class Operator:
    """Settings of what a layer's self-attention runs: a frozen dataclass, checked when it is made."""

    name: ClassVar[str]
    """Its name in a recipe file."""
    needs_module: ClassVar[bool] = False
    """Whether it has a module to be trained."""

    def __post_init__(self) -> None:
        check_types(self)

    @property
    def own_ranking(self) -> bool:
        """Whether each layer makes a plan of its own; else the layers of a level share one."""
        return False

    def plan(self, context: GridContext) -> Plan | None:
        """The plan of a call; None is full attention (no whole cell, nothing to merge)."""
        raise NotImplementedError


def check_operator(name: str, value: object) -> None:
    """Raise TypeError unless it is an operator, or None."""
    if value is not None and not isinstance(value, Operator):
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}: pass an operator, as Agents()")


def project(attn: Attention, tokens: Tensor, query: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value (B, heads, M, d) of tokens (B, M, C), through the layer's own projections.

    `query` (B, M, heads * d) is passed where it is projected already.
    """
    query = attn.to_q(tokens) if query is None else query
    query, key, value = (heads(attn, x) for x in (query, attn.to_k(tokens), attn.to_v(tokens)))
    if attn.norm_q is not None:
        query = attn.norm_q(query)
    if attn.norm_k is not None:
        key = attn.norm_k(key)
    return query, key, value


def project_out(attn: Attention, out: Tensor) -> Tensor:
    """(B, heads, M, d) -> (B, M, C), through the layer's own output projection."""
    out = out.transpose(1, 2).flatten(2)
    out = attn.to_out[1](attn.to_out[0](out))  # linear, dropout
    return out if attn.rescale_output_factor == 1 else out / attn.rescale_output_factor


def heads(attn: Attention, x: Tensor) -> Tensor:
    """(B, M, heads * d) -> (B, heads, M, d)."""
    return x.unflatten(2, (attn.heads, -1)).transpose(1, 2)
