"""Attention's residuals that steps of full attention leave for those that share them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..attention.operator import Plan
from ..attention.processor import LayerState
from ..attention.residual import FULL, SHARE
from .features import CachedFeatures


class Residuals:
    """The residuals of some layers, for the images of a text and a shape of latents.

    Args:
        layers: the patched layers.
        passes: of guidance that are in the batch.
        order: 0 keeps a residual as it was; 1 goes on along a line.
    """

    def __init__(self, layers: Sequence[LayerState], passes: int, order: int) -> None:
        self._layers, self._passes, self._order = layers, passes, order
        self._kept: dict[int, list[CachedFeatures]] = {}
        self._plans: dict[int, Plan] = {}
        self._images = 0
        self._stages: tuple[int, ...] | None = None

    def fit(self, stages: tuple[int, ...]) -> bool:
        """Whether there are any, of the operators of these stages, one an image."""
        return self._stages is not None and self._stages[-len(stages) :] == stages

    def plan_of(self, group: int, images: int) -> Plan | None:
        """The plan that a group's layers had with the last residual, for the last images of those."""
        plan = self._plans.get(group)
        return plan if plan is None or images == self._images else plan.of_last(self._images, images)

    def keep(self, sigma: float | None, stages: tuple[int, ...], plans: dict[int, Plan]) -> None:
        """Take in what the layers found in a call at a noise level, on images in these stages."""
        if self._stages != stages:  # another operator's
            self._kept.clear()
        for index, layer in enumerate(self._layers):
            if layer.residual is None:
                self._kept.pop(index, None)
                continue
            known = self._kept.setdefault(
                index, [CachedFeatures(self._order, self._order + 1) for _ in range(self._passes)]
            )
            for states, part in zip(known, layer.residual.chunk(self._passes), strict=True):
                states.keep(sigma, part)
        self._stages, self._images, self._plans = stages, len(stages), plans

    def give(self, sigma: float | None, images: int, between: bool, run: Sequence[bool]) -> None:
        """Hand each layer that is computed its residual at a noise level; without one attention is full.

        Args:
            sigma: the noise level.
            images: of the call, the last of those that residuals are known of.
            between: the level is between the last two, whatever the order.
            run: whether the call computes each layer.
        """
        for index, layer in enumerate(self._layers):
            known = self._kept.get(index) if run[index] else None
            if known is None:
                layer.attention = FULL
                continue
            at: Callable[[CachedFeatures], Tensor] = lambda s: (s.between if between else s.at)(sigma)  # noqa: E731
            parts = [at(states) for states in (known if images == self._images else known[-1:])]
            layer.attention, layer.residual = SHARE, parts[0] if len(parts) == 1 else torch.cat(parts)
