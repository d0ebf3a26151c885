"""Downsampled keys and values ("ToDo: Token Downsampling for Efficient Generation of High-Resolution Images",
2024)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import torch
from diffusers.models.attention_processor import Attention
from torch import Tensor

from .matching import sample_destinations, split_grid
from .operator import Attend, GridContext, Operator, Plan
from .ranking import check_stride


@dataclass(frozen=True)
class Downsample(Operator):
    """All queries, but keys and values of the first token in each cell alone, the same in every step.

    Sampled anew in every step, they would give images high-frequency noise.

    Attributes:
        stride: side of the cells.
        at_most: the stride grows where there would be more keys at the finest level; half as many at the
            second, where each is twice as wide. None never lets it.
    """

    name: ClassVar[str] = "downsample"

    stride: int = 2
    at_most: int | None = 2304

    def __post_init__(self) -> None:
        super().__post_init__()
        check_stride(self.stride, self.at_most)

    def plan(self, context: GridContext) -> DownsamplePlan | None:
        """Pick the tokens that are kept; None where no cell is whole."""
        bound = None if self.at_most is None else max(1, self.at_most // context.downsampling_factor)
        stride = context.stride(self.stride, bound)
        if min(context.grid) < stride:
            return None
        return DownsamplePlan(_first_of_cells(*context.grid, stride, context.device))


@lru_cache(maxsize=32)
def _first_of_cells(height: int, width: int, stride: int, device: Any) -> Tensor:
    """Positions (n,) of the first token of each cell: the same in every call."""
    with torch.inference_mode(False):  # else a later call's backward could not keep them
        return split_grid(height, width, stride, sample_destinations(height, width, stride, None)).dst.to(
            device
        )


class DownsamplePlan(Plan):
    """Positions (n,) of the tokens that give keys and values."""

    def __init__(self, kept: Tensor) -> None:
        self.kept = kept

    def attend(self, attn: Attention, tokens: Tensor, fallback: Attend) -> Tensor:
        """Attend from all tokens to the kept ones."""
        return fallback(tokens, tokens.index_select(1, self.kept))
