"""Gradient checkpointing: a backward computes layers again, on the plans of the forward before it."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from .attention.operator import Plan
from .hosts.models import checkpoints
from .layers import PatchedLayers


class _Graph:
    """Lives as long as a call's graph does; `computed` once its backward has begun."""

    computed = False

    def begin(self, grad: Tensor) -> None:
        """Hook of the output's gradient."""
        self.computed = True


class PendingBackward:
    """Keeps the layers' plans where a call's backward will compute the layers again."""

    def __init__(self) -> None:
        self._checkpoints = False
        self._graph: weakref.ref[_Graph] | None = None
        self._plans: list[Plan | None] = []

    def __reduce__(self) -> tuple[Any, ...]:  # a copy has no call under way
        return PendingBackward, ()

    def enter(self, model: Module, layers: PatchedLayers) -> None:
        """Note whether the call that begins is to be computed again.

        Raises:
            RuntimeError: the backward of the call before is still to come, and would see this one's plans.
        """
        graph = self._graph() if self._graph is not None else None
        awaited = graph is not None and not graph.computed
        self._checkpoints = checkpoints(model)
        self._plans = layers.plans() if awaited else []
        if awaited and torch.is_grad_enabled():
            raise RuntimeError(
                "agentsd: a second forward before the backward of the first, under gradient checkpointing "
                "which would compute the first again with the second's tokens; call backward() after each "
                "forward (gradients add up), or unet.disable_gradient_checkpointing()"
            )

    def leave(self, output: Any, layers: PatchedLayers) -> None:
        """Drop the plans of the call that gave this (None if it raised), unless its backward needs them."""
        sample = output[0] if isinstance(output, tuple) else getattr(output, "sample", None)
        if not isinstance(sample, Tensor) or not sample.requires_grad:
            layers.set_plans(self._plans)
        elif self._checkpoints:
            graph = _Graph()
            sample.register_hook(graph.begin)
            self._graph = weakref.ref(graph)
