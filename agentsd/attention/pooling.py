"""Agents pooled from the queries, A = Pooling(Q) of "Agent Attention" (ECCV 2024), Eq. 6."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d, pad


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
    """How the tokens of a grid are pooled into agents.

    Attributes:
        height, width: the token grid.
        grids: (rows, cols) of the agents in each stage that an image may be in.
        stage: for each grid (B, 1, 1), 1 where an image is in that stage and else 0; None for a single grid.
        mask: (B, 1, 1, n) which agents of the largest grid an image has; None where it has them all.
    """

    height: int
    width: int
    grids: tuple[tuple[int, int], ...]
    stage: tuple[Tensor, ...] | None = None
    mask: Tensor | None = None

    def of_last(self, images: int) -> Pool:
        """The same for the last images."""
        stage = None if self.stage is None else tuple(part[-images:] for part in self.stage)
        return self._replace(stage=stage, mask=None if self.mask is None else self.mask[-images:])


def make_pool(height: int, width: int, counts: Sequence[int], wanted: Sequence[int], device: Any) -> Pool:
    """Plan the pooling for images that want so many agents each.

    Args:
        height, width: the token grid.
        counts: the numbers of agents of all stages; all are computed where images differ, so that the
            shapes do not depend on the images.
        wanted: the number of agents of each image.
        device: where masks go.
    """
    if len(set(wanted)) == 1:
        return Pool(height, width, (agent_grid(wanted[0], height, width),))
    stages = sorted({count for count in counts if count})
    grids = tuple(agent_grid(count, height, width) for count in stages)
    given = torch.tensor(wanted, device="cpu")
    stage = tuple((given == count).view(-1, 1, 1).to(device) for count in stages)
    sizes = {count: rows * cols for count, (rows, cols) in zip(stages, grids, strict=True)}
    have = torch.tensor([sizes[count] for count in wanted], device="cpu")
    mask = torch.arange(max(sizes.values()), device="cpu") < have.view(-1, 1, 1, 1)
    return Pool(height, width, grids, stage, mask.to(device))


def pool_tokens(x: Tensor, pool: Pool) -> Tensor:
    """Tokens (B, N, C) -> agents (B, n, C), averages over the grid; an image with fewer has zeros last."""
    made = [pool_agents(x[:, None], pool.height, pool.width, rows, cols)[:, 0] for rows, cols in pool.grids]
    if pool.stage is None:
        return made[0]
    most = max(agents.shape[1] for agents in made)
    agents = x.new_zeros(x.shape[0], most, x.shape[2])
    for some, stage in zip(made, pool.stage, strict=True):
        agents = agents + stage * pad(some, (0, 0, 0, most - some.shape[1]))
    return agents
