"""Attention's residuals that steps of full attention leave for those that share them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..attention.operator import Plan
from ..attention.processor import LayerState
from ..attention.residual import FULL, SHARE
from .features import CachedFeatures


class Residuals:
    """The residuals of some layers, for the images of a text and a shape of latents.

    Args:
        layers: the patched layers.
        order: 0 keeps a residual as it was; 1 extrapolates it linearly.
    """

    def __init__(self, layers: Sequence[LayerState], order: int) -> None:
        self._layers, self._order = layers, order
        self._kept = CachedFeatures(order, order + 1)
        self._indices: dict[int, int] = {}  # of the layers that have one: where it is in the list
        self._plans: dict[int, Plan] = {}
        self._stage: int | None = None

    def fit(self, stage: int) -> bool:
        """Whether there are any, of the operators of this stage."""
        return self._stage == stage

    def plan_of(self, group: int) -> Plan | None:
        """The plan that a group's layers had with the last residual."""
        return self._plans.get(group)

    def keep(self, sigma: float | None, stage: int, plans: dict[int, Plan]) -> None:
        """Take in what the layers found in a call at a noise level, in this stage of the run."""
        found = {
            index: layer.residual for index, layer in enumerate(self._layers) if layer.residual is not None
        }
        indices = {layer: i for i, layer in enumerate(found)}
        if (self._stage, self._indices) != (stage, indices):  # another operator's, or of other layers
            self._kept = CachedFeatures(self._order, self._order + 1)
        self._kept.keep(sigma, list(found.values()))
        self._indices, self._stage, self._plans = indices, stage, plans

    def give(self, sigma: float | None, interpolate: bool, computed: Sequence[bool]) -> None:
        """Hand each layer that is computed its residual at a noise level; without one attention is full.

        Args:
            sigma: the noise level.
            interpolate: the level is between the last two, whatever the order.
            computed: whether the call computes each layer.
        """
        given = [index for index in self._indices if computed[index]]

        def select(residuals: list[Tensor]) -> list[Tensor]:
            return [residuals[self._indices[index]] for index in given]

        found = (self._kept.interpolate if interpolate else self._kept.extrapolate)(sigma, select)
        residuals = dict(zip(given, found, strict=True))
        for index, layer in enumerate(self._layers):
            layer.residual = residuals.get(index)
            layer.attention = FULL if layer.residual is None else SHARE
