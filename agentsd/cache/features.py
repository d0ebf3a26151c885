"""Features that computed steps leave for cached ones."""

from __future__ import annotations

import torch
from torch import Tensor


class CachedFeatures:
    """The last states of some pictures, with the noise level of each.

    Args:
        order: 0 keeps a state as it was; 1 goes on along a line.
        count: how many are kept.
    """

    def __init__(self, order: int, count: int) -> None:
        self._order, self._count = order, count
        self._kept: list[tuple[float | None, Tensor]] = []

    def __bool__(self) -> bool:
        return bool(self._kept)

    def keep(self, sigma: float | None, state: Tensor) -> None:
        """Take in a computed step's state (B, C, H, W); a repeated noise level replaces the one before."""
        others = [kept for kept in self._kept if kept[0] != sigma or sigma is None]
        self._kept = [*others, (sigma, state)][-self._count :]

    def at(self, sigma: float | None) -> Tensor:
        """The state at a noise level after the last one: that one, or on the line through the last two."""
        return self.between(sigma) if self._order else self._kept[-1][1]

    def between(self, sigma: float | None) -> Tensor:
        """The state on the line through the last two over sigma; of one alone or unknown levels, the last."""
        last, state = self._kept[-1]
        if len(self._kept) == 1:
            return state
        before, start = self._kept[-2]
        if sigma is None or last is None or before is None or last == before:
            return state
        return torch.lerp(start, state, (sigma - before) / (last - before))
