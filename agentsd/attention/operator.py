"""The interface of self-attention operators: settings that make a plan for each call."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from diffusers.models.attention_processor import Attention
from torch import Tensor

from ..checks import check_types

MODULE = "agentsd_module"
"""Name of a layer's trainable module."""

Attend = Callable[..., Tensor]
"""What would run without the patch: (hidden_states, context) -> output; without context, self-attention."""


@dataclass(frozen=True)
class GridContext:
    """The token grid that an operator runs on in a call.

    Attributes:
        grid: height and width in tokens.
        downsampling_factor: width of a token, in tokens of the finest patched level.
        device: the device for index tensors.
        key: (seed, number of the group of layers, timestep), which seeds random draws.
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
        """Return the width of square cells: at least `least`, and so large that `at_most` cells fit."""
        if at_most is None:
            return least
        return max(least, math.ceil(math.sqrt(self.tokens / at_most)))


class Plan:
    """What an operator does in the layers of a group in one call.

    Attributes:
        ranks: whether `rank` must be called before `attend`.
    """

    ranks: bool = False

    def rank(self, block_input: Tensor) -> None:
        """Rank the tokens by a block's input (B, N, C) before `norm1`."""

    def hold(self) -> None:
        """Keep the token map after the layer's call, as other calls will use the plan."""

    def attend(self, attn: Attention, tokens: Tensor, fallback: Attend) -> Tensor:
        """Return a layer's self-attention on (B, N, C)."""
        raise NotImplementedError


class Operator:
    """The settings of an operator: a frozen dataclass that checks itself when it is made."""

    name: ClassVar[str]
    """Its name in a recipe file."""
    needs_module: ClassVar[bool] = False
    """Whether it needs a trained module."""

    def __post_init__(self) -> None:
        check_types(self)

    @property
    def own_ranking(self) -> bool:
        """Whether each layer makes its own plan. Otherwise the layers of a level share one."""
        return False

    def plan(self, context: GridContext) -> Plan | None:
        """Return the plan of a call; None is full attention (no whole cell, nothing to merge)."""
        raise NotImplementedError


def check_operator(name: str, value: object) -> None:
    """Raise TypeError unless the value is an operator or None."""
    if value is not None and not isinstance(value, Operator):
        raise TypeError(f"{name}={value!r}: pass an operator, as Agents()")


def project(attn: Attention, tokens: Tensor, query: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Project tokens (B, M, C) to query, key and value (B, heads, M, d), by the layer's own projections.

    Pass `query` (B, M, heads * d) if it is already projected.
    """
    query = attn.to_q(tokens) if query is None else query
    query, key, value = (heads(attn, x) for x in (query, attn.to_k(tokens), attn.to_v(tokens)))
    if attn.norm_q is not None:
        query = attn.norm_q(query)
    if attn.norm_k is not None:
        key = attn.norm_k(key)
    return query, key, value


def project_out(attn: Attention, out: Tensor) -> Tensor:
    """Project (B, heads, M, d) -> (B, M, C), by the layer's own output projection."""
    out = out.transpose(1, 2).flatten(2)
    out = attn.to_out[1](attn.to_out[0](out))  # linear, dropout
    return out if attn.rescale_output_factor == 1 else out / attn.rescale_output_factor


def heads(attn: Attention, x: Tensor) -> Tensor:
    """(B, M, heads * d) -> (B, heads, M, d)."""
    return x.unflatten(2, (attn.heads, -1)).transpose(1, 2)
