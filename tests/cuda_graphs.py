"""A backend of torch.compile whose outputs live as CUDA graphs' do, on a machine without CUDA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._inductor.cudagraph_trees import CUDAGraphTreeManager


class OverwrittenOutputs:
    """Runs graphs as they are, and overwrites what they gave when torch's own count begins a new generation.

    As under `mode="reduce-overhead"`: each call of a compiled function begins one, or, once it is in use,
    each `torch.compiler.cudagraph_mark_step_begin()`. Numbers become NaN, indices one that no tensor has.

    Attributes:
        overwritten: how many outputs were.
    """

    def __init__(self) -> None:
        self.overwritten = 0
        self._given: list[Tensor] = []
        self._generation = 0

    def __call__(self, graph: Callable[..., Any], inputs: Any) -> Callable[..., Any]:
        """Compile a graph."""

        def run(*args: Any) -> Any:
            self._begin()
            outputs = [out.clone() if isinstance(out, Tensor) else out for out in graph(*args)]
            self._given += [out for out in outputs if isinstance(out, Tensor)]
            return outputs

        return run

    def _begin(self) -> None:
        generation = CUDAGraphTreeManager.get_curr_generation()
        if generation == self._generation:
            return
        self._generation = generation
        for out in self._given:
            out.fill_(torch.nan if out.is_floating_point() else torch.iinfo(out.dtype).max)
        self.overwritten += len(self._given)
        self._given.clear()
