"""Bipartite soft matching: which tokens are most alike (ToMeSD, Bolya and Hoffman 2023, section 3).

The plan only, no data is moved: `agentsd.attention.merging` applies it.
"""

from __future__ import annotations

import hashlib
import struct
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

# Entries of the score matrix that are held at once; larger ones are computed in slices of the sources.
SCORE_BUDGET = 2**26


class Partition(NamedTuple):
    """Positions of the tokens on the flattened grid, split into sources and destinations.

    Attributes:
        positions: (N,) those of the sources, then those of the destinations; they travel as one tensor.
        sources, targets: how many they are, as numbers: older torch compiles no property of a tuple.
    """

    positions: Tensor
    sources: int
    targets: int

    @property
    def src(self) -> Tensor:
        """(N-n,) positions of the sources."""
        return self.positions[: self.sources]

    @property
    def dst(self) -> Tensor:
        """(n,) positions of the destinations."""
        return self.positions[self.sources :]


class Ranking(NamedTuple):
    """How alike the sources are to their best destinations.

    Attributes:
        order: (B, N-n) indices into `src`, best first.
        match: (B, N-n) index into `dst` of each source's best destination.
        src, dst: (N-n,) and (n,) positions of the sources and the destinations.
    """

    order: Tensor
    match: Tensor
    src: Tensor
    dst: Tensor


def sample_destinations(height: int, width: int, stride: int, key: tuple[int, int, float] | None) -> Tensor:
    """One offset in [0, stride**2) for each whole `stride x stride` cell: (height//stride, width//stride).

    `key` is (seed, layer, step): the same key gives the same offsets on every machine and in every call.
    None takes the first token of each cell.
    """
    shape = (height // stride, width // stride)
    if key is None:
        return torch.zeros(shape, dtype=torch.int64, device="cpu")
    digest = hashlib.blake2b(struct.pack("<qqd", *key), digest_size=8).digest()
    generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest, "little", signed=True))
    return torch.randint(stride * stride, shape, generator=generator, device="cpu")


def split_grid(height: int, width: int, stride: int, destinations: Tensor) -> Partition:
    """Split the tokens of a `height x width` grid: the one at its offset in each cell is a destination.

    Rows and columns beyond the last whole cell hold sources only.
    """
    # In numpy: on a GPU a call is bound by what torch is asked to do.
    rows, cols = destinations.shape
    offsets = destinations.numpy()
    y = np.arange(rows)[:, None] * stride + offsets // stride
    x = np.arange(cols)[None, :] * stride + offsets % stride
    dst = np.sort((y * width + x).ravel())
    is_src = np.ones(height * width, dtype=bool)
    is_src[dst] = False
    positions = np.concatenate([np.flatnonzero(is_src), dst])
    return Partition(torch.from_numpy(positions), len(positions) - len(dst), len(dst))


@torch.no_grad()
def rank_tokens(metric: Tensor, partition: Partition) -> Ranking:
    """Rank the sources of `metric` (B, N, C) by cosine similarity to their best destination.

    A token of zero norm is alike to none (similarity 0), so no NaN arises.
    """
    positions = partition.positions.to(metric.device)
    src, dst = positions.tensor_split([partition.sources])
    precise = torch.promote_types(metric.dtype, torch.float32)
    metric = metric.index_select(1, positions)
    norm = torch.linalg.vector_norm(metric, dim=-1, dtype=precise)
    norm = norm.clamp_min(torch.finfo(torch.float32).tiny)
    sources, targets = metric.tensor_split([src.numel()], dim=1)
    # A source's own norm does not change which destination is best: it is divided out of the best one.
    targets = (targets / norm[:, src.numel() :, None]).to(metric.dtype).transpose(1, 2)
    step = max(1, SCORE_BUDGET // (metric.shape[0] * max(1, dst.numel())))
    best = [(part @ targets).max(dim=-1) for part in sources.split(step, dim=1)]
    value, match = best[0] if len(best) == 1 else (torch.cat(part, dim=1) for part in zip(*best, strict=True))
    similarity = value / norm[:, : src.numel()]
    return Ranking(similarity.argsort(dim=1, descending=True, stable=True), match, src, dst)
