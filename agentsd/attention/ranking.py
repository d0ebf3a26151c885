"""Token ranking in a call: destinations are sampled once; the first layer that runs ranks tokens for all."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..checks import check
from .matching import Partition, Ranking, rank_tokens, sample_destinations, split_grid
from .merging import make_merge_map
from .operator import GridContext, Operator, Plan


def check_stride(stride: int, at_most: int | None = None) -> None:
    """Raise ValueError for a bad side of cells, or bound of their number."""
    check("stride", stride, stride >= 2, "pass 2 or more")
    check("at_most", at_most, at_most is None or at_most >= 1, "pass 1 or more, or None for no bound")


class RankedOperator(Operator):
    """An operator whose plan ranks tokens by their likeness to one destination in each cell."""

    ratio: float
    stride: int
    ranking: str
    destinations: str
    at_most: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_stride(self.stride, self.at_most)
        most = 1 - 1 / self.stride**2
        check("ratio", self.ratio, 0 <= self.ratio <= most, f"pass 0 to {most:g}, as each cell keeps a token")
        check("ranking", self.ranking, self.ranking in ("level", "layer"), "choose 'level' or 'layer'")
        ok = self.destinations in ("random", "first")
        check("destinations", self.destinations, ok, "choose 'random' or 'first'")

    @property
    def own_ranking(self) -> bool:
        """Whether each layer ranks its own tokens."""
        return self.ranking == "layer"

    def sample_partition(self, context: GridContext, stride: int) -> Partition:
        """Sample a destination in each cell: random ones are sampled anew for each (seed, group, step)."""
        key = context.key if self.destinations == "random" else None
        offsets = sample_destinations(*context.grid, stride, key)
        partition = split_grid(*context.grid, stride, offsets)
        return partition._replace(positions=_to(partition.positions, context.device))


def _to(index: Tensor, device: Any) -> Tensor:
    kind = torch.device(device).type
    if kind == "cuda":  # from pageable memory the host would wait for the device
        return index.pin_memory().to(device, non_blocking=True)
    return index if kind == "cpu" else index.to(device)


class RankedPlan(Plan):
    """A plan whose tokens are ranked and then merged.

    Args:
        partition: sources and destinations.
        ratio: share of the tokens merged away.
        own: each layer ranks its own tokens.

    Attributes:
        maps: how tokens are merged, once they are ranked; None where none are.
    """

    def __init__(self, partition: Partition, ratio: float, own: bool) -> None:
        self.partition, self.ratio, self.own = partition, ratio, own
        self.ranks = True
        self.maps: Any = None

    def rank(self, block_input: Tensor) -> None:
        """Rank the tokens (B, N, C) of a block's input and make the operator's merge maps."""
        ranking = rank_tokens(block_input, self.partition)
        n_merged = min(int(block_input.shape[1] * self.ratio), self.partition.sources)
        self.maps = self.make_maps(ranking, block_input, n_merged)
        self.ranks = False

    def make_maps(self, ranking: Ranking, block_input: Tensor, n_merged: int) -> Any:
        """The operator's merge maps of a ranking: of the tokens alone, None where none are merged."""
        return make_merge_map(ranking, n_merged, block_input.dtype) if n_merged else None

    def hold(self) -> None:
        """Keep the maps beyond a layer's own call."""
        self.own = False

    def forget(self) -> None:
        """Let go of the maps, where they are one layer's alone: they are large where tokens are many."""
        if self.own:
            self.maps, self.ranks = None, True
