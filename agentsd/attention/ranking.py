"""Token ranking in a call: destinations are sampled once; the first layer that runs ranks tokens for all."""

from __future__ import annotations

from copy import copy
from typing import Any

import torch
from torch import Tensor

from ..checks import check
from .matching import Partition, Ranking, rank_tokens, sample_destinations, split_grid
from .merging import MergeMap, make_merge_map, of_last
from .operator import GridContext, Plan

DESTINATIONS = ("auto", "random", "first")


def check_destinations(destinations: str, stride: int, at_most: int | None = None) -> None:
    """Raise ValueError for a bad way to sample destinations, or a bad size of their cells."""
    check(
        "destinations",
        destinations,
        destinations in DESTINATIONS,
        "choose " + " or ".join(map(repr, DESTINATIONS)),
    )
    check("stride", stride, stride >= 2, "pass 2 or more")
    check("at_most", at_most, at_most is None or at_most >= 1, "pass 1 or more, or None for no bound")


def sample_partition(context: GridContext, stride: int, destinations: str) -> Partition:
    """Sample a destination in each cell: random ones are sampled anew for each (seed, group, step).

    "auto" is random for an even batch and first for an odd one, as ToMeSD does; a half goes by both halves.
    """
    even = context.half or context.batch % 2 == 0
    random = destinations == "random" or (destinations == "auto" and even)
    offsets = sample_destinations(*context.grid, stride, context.key if random else None)
    return Partition(*(_to(index, context.device) for index in split_grid(*context.grid, stride, offsets)))


def _to(index: Tensor, device: Any) -> Tensor:
    kind = torch.device(device).type
    if kind == "cuda":  # from pageable memory the host would wait for the device
        return index.pin_memory().to(device, non_blocking=True)
    return index if kind == "cpu" else index.to(device)


class RankedPlan(Plan):
    """A plan whose tokens are ranked and then merged.

    Attributes:
        tokens: how the tokens are merged, once they are ranked; None where none are.
    """

    tokens: MergeMap | None = None

    def __init__(self, partition: Partition, ratio: float, own: bool) -> None:
        self.partition = partition
        self.ratio = ratio
        self.own = own
        self.ranked = False

    @property
    def ranks(self) -> bool:
        """Whether there is no ranking yet."""
        return not self.ranked

    def rank(self, block_input: Tensor) -> None:
        """Rank the tokens (B, N, C) of a block's input and make the operator's merge maps."""
        ranking = rank_tokens(block_input, self.partition)
        n_merged = min(int(block_input.shape[1] * self.ratio), self.partition.src.numel())
        self.make_maps(ranking, block_input, n_merged)
        self.ranked = True

    def make_maps(self, ranking: Ranking, block_input: Tensor, n_merged: int) -> None:
        """Make the operator's merge maps of a ranking."""
        self.tokens = make_merge_map(ranking, n_merged, block_input.dtype) if n_merged else None

    def hold(self) -> None:
        """Keep the maps beyond a layer's own call."""
        self.own = False

    def of_last(self, batch: int, images: int) -> RankedPlan:
        """The same maps for the last images of a batch."""
        plan = copy(self)
        if self.tokens is not None:
            plan.tokens = of_last(self.tokens, batch, images)
        return plan

    def forget(self) -> None:
        """Let go of the maps, where they are one layer's alone: they are large where tokens are many."""
        if self.own:
            self.tokens, self.ranked = None, False
