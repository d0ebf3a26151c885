"""The trainable agent attention module of "Agent Attention" (ECCV 2024): Eq. 3, 5, 6 and appendix A."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate, scaled_dot_product_attention

from ..attention.pooling import agent_grid, pool_agents
from .grid import GridConvolution, check_tokens


def biased_agent_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    agent: Tensor,
    gather_bias: Tensor | None = None,
    broadcast_bias: Tensor | None = None,
    scale: float = -0.5,
) -> Tensor:
    """`softmax(d**scale * Q A^T + B2) softmax(d**-0.5 * A K^T + B1) V`, for each head (Eq. 5).

    Args:
        query, key, value: (B, heads, N, d).
        agent: (B, heads, n, d).
        gather_bias: B1, (heads, n, N).
        broadcast_bias: B2, (heads, N, n).
        scale: exponent of the head width `d` in the broadcast softmax.

    Returns:
        (B, heads, N, d).
    """
    width = query.shape[-1]
    gathered = scaled_dot_product_attention(
        agent, key, value, attn_mask=_as_mask(gather_bias), scale=width**-0.5
    )
    return scaled_dot_product_attention(
        query, agent, gathered, attn_mask=_as_mask(broadcast_bias), scale=width**scale
    )


def _as_mask(bias: Tensor | None) -> Tensor | None:
    # CUDA's fused kernels refuse a mask whose last axis is strided, and B2 is built transposed
    return None if bias is None else bias.contiguous()[None]


class AgentBias(nn.Module):
    """One agent bias as the sum of a row, a column and a block part (appendix A); zero at first.

    Args:
        heads: number of attention heads.
        agents: n.
        grid: (height, width) at which the row and the column part hold a number for each token.
        block_size: side of the block part.
    """

    def __init__(self, heads: int, agents: int, grid: tuple[int, int], block_size: int) -> None:
        super().__init__()
        self.row = nn.Parameter(torch.zeros(heads, agents, grid[0], 1))
        self.column = nn.Parameter(torch.zeros(heads, agents, 1, grid[1]))
        self.block = nn.Parameter(torch.zeros(heads, agents, block_size, block_size))

    def reset(self, normal: bool, generator: torch.Generator | None = None) -> None:
        """Start at zero, or as an untrained network does."""
        for part in self.parameters():
            if normal:
                nn.init.trunc_normal_(part, std=0.02, generator=generator)
            else:
                nn.init.zeros_(part)

    def forward(self, height: int, width: int) -> Tensor:
        """(heads, n, N): the three parts, resized bilinearly to N = height * width tokens."""
        row, column, block = (
            interpolate(part, size=size, mode="bilinear")
            for part, size in (
                (self.row, (height, 1)),
                (self.column, (1, width)),
                (self.block, (height, width)),
            )
        )
        return (row + column + block).flatten(2)


def resize_agents(part: Tensor, grid: tuple[int, int], agents: tuple[int, int]) -> Tensor:
    """A part of a bias for other agents: bilinear, over the grid that they are pooled on (appendix C.2).

    Args:
        part: (heads, n, h, w) of an `AgentBias`.
        grid: (height, width) of the token grid.
        agents: (rows, cols) of the agents that are wanted.

    Returns:
        (heads, rows * cols, h, w).
    """
    heads, n, height, width = part.shape
    over_agents = part.permute(0, 2, 3, 1).reshape(-1, 1, *agent_grid(n, *grid))
    resized = interpolate(over_agents, size=agents, mode="bilinear")
    return resized.reshape(heads, height, width, -1).permute(0, 3, 1, 2).contiguous()


class AgentAttention(nn.Module):
    """Agent attention with pooled agents, agent biases and a convolution on V (Eq. 6), on any token grid.

    At first the biases are zero and the convolution is `k V`: this is Eq. 9, `agent_attention` with
    `pool_agents`. With `bias=False` it is so to the bit (on a CPU, not in half precision); with zero
    biases, as closely as the fused kernel with a mask agrees with the one without.

    Args:
        heads, head_dim: number and width of the heads.
        grid: (height, width) of the token grid in training; it shapes the agents and the bias tables.
        agents: the most agents to pool; `agent_grid` says how many fit the grid.
        block_size: side of the block part of the biases.
        scale: exponent of `head_dim` in the broadcast softmax.
        k: weight of V at the centre of the convolution, or of V itself without one.
        bias, convolution: whether there are any (Table 6).
        from_scratch: start as an untrained network does, with normal biases (std 0.02) and a random
            convolution, not from Eq. 9.
    """

    def __init__(
        self,
        heads: int,
        head_dim: int,
        *,
        grid: tuple[int, int],
        agents: int = 49,
        block_size: int = 7,
        scale: float = -0.5,
        k: float = 0.0,
        bias: bool = True,
        convolution: bool = True,
        from_scratch: bool = False,
    ) -> None:
        super().__init__()
        self.heads, self.head_dim, self.scale, self.k = heads, head_dim, scale, k
        self.rows, self.cols = agent_grid(agents, *grid)
        # So that their number tells how they lie, when they are resized.
        while (again := agent_grid(self.rows * self.cols, *grid)) != (self.rows, self.cols):
            self.rows, self.cols = again
        pooled = self.rows * self.cols
        self.gather_bias = AgentBias(heads, pooled, grid, block_size) if bias else None
        self.broadcast_bias = AgentBias(heads, pooled, grid, block_size) if bias else None
        self.convolution = GridConvolution(heads, head_dim, kernel_size=3) if convolution else None
        self.grid, self.from_scratch = grid, from_scratch
        self.reset()

    def reset(self, generator: torch.Generator | None = None) -> None:
        """Start untrained: from Eq. 9, or from what is drawn."""
        if self.convolution is not None:
            self.convolution.reset(generator)
            if not self.from_scratch:
                self.convolution.reset_to_scaling(self.k)
        for bias in (self.gather_bias, self.broadcast_bias):
            if bias is not None:
                bias.reset(self.from_scratch, generator)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, height: int, width: int) -> Tensor:
        """(B, heads, N, d) each -> (B, heads, N, d), N = height * width; ValueError for another N."""
        check_tokens(self.heads, self.head_dim, height, width, query, key, value)
        agent = pool_agents(query, height, width, self.rows, self.cols)
        gather_bias = None if self.gather_bias is None else self.gather_bias(height, width)
        broadcast_bias = None if self.broadcast_bias is None else self.broadcast_bias(height, width).mT
        out = biased_agent_attention(query, key, value, agent, gather_bias, broadcast_bias, self.scale)
        if self.convolution is None:
            return torch.add(out, value, alpha=self.k)
        local: Tensor = self.convolution(value, height, width)
        return out + local
