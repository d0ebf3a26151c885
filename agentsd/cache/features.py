"""Features that computed steps leave for cached ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

Select: TypeAlias = Callable[[list[Tensor]], list[Tensor]]


class CachedFeatures:
    """The features of the last computed steps, with the noise level of each: a list of tensors a step.

    Args:
        order: 0 keeps features as they were; 1 extrapolates them linearly.
        count: of how many steps they are kept.
    """

    def __init__(self, order: int, count: int) -> None:
        self._order, self._count = order, count
        self._kept: list[tuple[float | None, list[Tensor]]] = []

    def __bool__(self) -> bool:
        return bool(self._kept)

    def keep(self, sigma: float | None, features: list[Tensor]) -> None:
        """Take in a computed step's features; a repeated noise level replaces the one before."""
        others = [kept for kept in self._kept if kept[0] != sigma or sigma is None]
        self._kept = [*others, (sigma, features)][-self._count :]

    def extrapolate(self, sigma: float | None, select: Select = list) -> list[Tensor]:
        """The features at a noise level after the last: as they were, or on the line through the last two.

        Args:
            sigma: the noise level.
            select: takes those that are wanted from a step's.
        """
        return self.interpolate(sigma, select) if self._order else select(self._kept[-1][1])

    def interpolate(self, sigma: float | None, select: Select = list) -> list[Tensor]:
        """The features on the line over sigma through the last two; the last, where no line is known."""
        last, features = self._kept[-1]
        ends = select(features)
        if len(self._kept) == 1 or not ends:
            return ends
        before, earlier = self._kept[-2]
        if sigma is None or last is None or before is None or last == before:
            return ends
        return list(torch._foreach_lerp(select(earlier), ends, (sigma - before) / (last - before)))
