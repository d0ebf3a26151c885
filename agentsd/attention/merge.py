"""Token merging (ToMeSD, Bolya and Hoffman 2023): attention on merged tokens, copied back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from diffusers.models.attention_processor import Attention
from torch import Tensor

from .merging import merge, unmerge
from .operator import Attend, GridContext
from .ranking import RankedOperator, RankedPlan


@dataclass(frozen=True)
class Merge(RankedOperator):
    """Tokens are merged by `ratio` before attention.

    Attributes:
        ratio, ranking, destinations: see `Agents`.
        stride: side of the cells that hold one destination token each.
    """

    name: ClassVar[str] = "merge"

    ratio: float = 0.4
    stride: int = 2
    ranking: str = "level"
    destinations: str = "random"

    def plan(self, context: GridContext) -> MergePlan | None:
        """Sample the destinations; None where no cell is whole, or nothing is to be merged."""
        if self.ratio == 0 or min(context.grid) < self.stride:
            return None
        return MergePlan(self.sample_partition(context, self.stride), self.ratio, self.own_ranking)


class MergePlan(RankedPlan):
    """Merged tokens."""

    def attend(self, attn: Attention, tokens: Tensor, fallback: Attend) -> Tensor:
        """Merge, attend, unmerge."""
        merge_map = self.maps
        if merge_map is None:
            return fallback(tokens)
        out = fallback(merge(tokens, merge_map))
        self.forget()
        return unmerge(out, merge_map)
