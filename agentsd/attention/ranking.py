"""Token ranking in a call: cells drawn once, tokens ranked by the first layer that runs, cuts kept."""

from __future__ import annotations

from copy import copy
from typing import Any

import torch
from torch import Tensor

from ..checks import check
from .matching import Partition, Ranking, draw_cells, rank_tokens, split_grid
from .merging import Cut, cut_ranking, of_last
from .operator import Place, Plan

CELLS = ("auto", "random", "first")


def check_cells(cells: str, stride: int, at_most: int | None = None) -> None:
    """Raise ValueError for a bad way to draw cells, or a bad size of them."""
    check("cells", cells, cells in CELLS, "choose " + " or ".join(map(repr, CELLS)))
    check("stride", stride, stride >= 2, "pass 2 or more")
    check("at_most", at_most, at_most is None or at_most >= 1, "pass 1 or more, or None for no bound")


def partition(place: Place, stride: int, cells: str) -> Partition:
    """Draw the destinations: random cells are drawn anew for each (seed, group, step).

    "auto" is random for an even batch and first for an odd one, as ToMeSD does; a half goes by both halves.
    """
    even = place.half or place.batch % 2 == 0
    random = cells == "random" or (cells == "auto" and even)
    offsets = draw_cells(*place.grid, stride, place.key if random else None)
    return Partition(*(_to(index, place.device) for index in split_grid(*place.grid, stride, offsets)))


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

    tokens: Cut | None = None

    def __init__(self, drawn: Partition, ratio: float, own: bool) -> None:
        self.drawn = drawn
        self.ratio = ratio
        self.own = own
        self.ranked = False

    @property
    def ranks(self) -> bool:
        """Whether there is no ranking yet."""
        return not self.ranked

    def rank(self, block_input: Tensor) -> None:
        """Rank the tokens (B, N, C) of a block's input and cut the ranking."""
        ranking = rank_tokens(block_input, self.drawn)
        n_merged = min(int(block_input.shape[1] * self.ratio), self.drawn.src.numel())
        self.cut(ranking, block_input, n_merged)
        self.ranked = True

    def cut(self, ranking: Ranking, block_input: Tensor, n_merged: int) -> None:
        """Make the operator's cuts of the ranking."""
        self.tokens = cut_ranking(ranking, n_merged, block_input.dtype) if n_merged else None

    def hold(self) -> None:
        """Keep the cuts beyond a layer's own call."""
        self.own = False

    def of_last(self, batch: int, images: int) -> RankedPlan:
        """The same cuts for the last images of a batch."""
        plan = copy(self)
        if self.tokens is not None:
            plan.tokens = of_last(self.tokens, batch, images)
            plan.feed_forward = plan.tokens if self.feed_forward is not None else None
        return plan

    def forget(self) -> None:
        """Let go of the cuts, where they are one layer's alone: they are large where tokens are many."""
        if self.own:
            self.tokens, self.ranked = None, False
