"""Token merging (ToMeSD, Bolya and Hoffman 2023): attention on merged tokens, copied back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from diffusers.models.attention_processor import Attention
from torch import Tensor

from ..checks import check_share
from .agents import check_ranking
from .merging import merge, unmerge
from .operator import Attend, Operator, Place
from .ranking import RankedPlan, check_cells, partition


@dataclass(frozen=True)
class Merge(Operator):
    """Tokens are merged by `ratio` before attention.

    Attributes:
        ratio, ranking, cells: see `Agents`.
        stride: side of the cells that hold one destination token each.
    """

    name: ClassVar[str] = "merge"

    ratio: float = 0.4
    stride: int = 2
    ranking: str = "level"
    cells: str = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share("ratio", self.ratio, below_one=True)
        check_cells(self.cells, self.stride)
        check_ranking(self.ranking)

    @property
    def own_ranking(self) -> bool:
        """Whether each layer ranks its own tokens."""
        return self.ranking == "layer"

    def plan(self, place: Place) -> MergePlan | None:
        """Draw the cells; None where not one is whole, or nothing is to be merged."""
        if self.ratio == 0 or min(place.grid) < self.stride:
            return None
        return MergePlan(partition(place, self.stride, self.cells), self.ratio, self.own_ranking)


class MergePlan(RankedPlan):
    """Merged tokens."""

    def attend(self, attn: Attention, tokens: Tensor, wrapped: Attend) -> Tensor:
        """Merge, attend, unmerge."""
        cut = self.tokens
        if cut is None:
            return wrapped(tokens)
        out = wrapped(merge(tokens, cut))
        self.forget()
        return unmerge(out, cut)
