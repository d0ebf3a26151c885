"""Agents pooled from the queries, A = Pooling(Q) of "Agent Attention" (ECCV 2024), Eq. 6."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d


def agent_grid(agents: int, height: int, width: int) -> tuple[int, int]:
    """(rows, cols) of at most `agents` agents, shaped as nearly like the (height, width) token grid as fits.

    Each number of rows is given as many columns as fit; there are never more agents than tokens.
    """
    if min(agents, height, width) < 1:
        raise ValueError(f"agents={agents}, grid {height} x {width}: pass 1 or more of each")
    fits = [(rows, min(width, agents // rows)) for rows in range(1, min(agents, height) + 1)]
    return min(fits, key=lambda fit: abs(math.log(fit[0] * width / (fit[1] * height))))


def pool_agents(query: Tensor, height: int, width: int, rows: int, cols: int) -> Tensor:
    """Adaptive average pooling over the token grid: (B, heads, N, d) -> (B, heads, rows * cols, d).

    N = height * width and the agents go row by row. The gradient is a sum of atomics on CUDA: not repeatable
    to the bit there.
    """
    grid = query.transpose(2, 3).flatten(1, 2).unflatten(2, (height, width))
    whole = height % rows == 0 and width % cols == 0
    products = on_mps(grid) and not whole  # MPS averages whole cells alone
    pooled = multiply(grid, rows, cols) if products else adaptive_avg_pool2d(grid, (rows, cols))
    return pooled.flatten(2).unflatten(1, (query.shape[1], -1)).transpose(2, 3)


def on_mps(x: Tensor) -> bool:
    """Whether a tensor is on Apple's GPU."""
    return x.device.type == "mps"


def multiply(grid: Tensor, rows: int, cols: int) -> Tensor:
    """Adaptive average pooling (B, C, H, W) -> (B, C, rows, cols) by products with the averages' weights."""
    height, width = (_weights(*sizes).to(grid) for sizes in ((grid.shape[2], rows), (grid.shape[3], cols)))
    return height @ grid @ width.mT


def _weights(size: int, parts: int) -> Tensor:
    """(parts, size) weights of averages: part i begins at floor(i size / parts); its end is a ceiling."""
    weights = torch.zeros(parts, size, device="cpu")
    for i in range(parts):
        begin, end = i * size // parts, -(-(i + 1) * size // parts)
        weights[i, begin:end] = 1 / (end - begin)
    return weights


class Pool(NamedTuple):
    """How the tokens of a (height, width) grid are pooled into rows x cols agents."""

    height: int
    width: int
    rows: int
    cols: int


def pool_tokens(x: Tensor, pool: Pool) -> Tensor:
    """Tokens (B, N, C) -> agents (B, n, C), averages over the grid."""
    return pool_agents(x[:, None], *pool)[:, 0]
