"""Hidden states that full calls leave for cheap ones."""

from __future__ import annotations

import torch
from torch import Tensor


class States:
    """The last states of some pictures, with the noise level of each."""

    def __init__(self, order: int) -> None:
        self._count = order + 1
        self._kept: list[tuple[float, Tensor]] = []

    def __bool__(self) -> bool:
        return bool(self._kept)

    def keep(self, level: float, state: Tensor) -> None:
        """Take in a full call's state (B, C, H, W); a repeated noise level replaces the one before."""
        others = [kept for kept in self._kept if kept[0] != level]
        self._kept = [*others, (level, state)][-self._count :]

    def at(self, level: float) -> Tensor:
        """The state at a noise level: the last one, or the line through the last two."""
        last, state = self._kept[-1]
        if len(self._kept) == 1:
            return state
        before, start = self._kept[-2]
        return torch.lerp(start, state, (level - before) / (last - before))
