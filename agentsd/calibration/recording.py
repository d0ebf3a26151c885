"""A baseline run's U-Net calls, step by step, with the state that cached steps are made from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..cache.conditional import sample_of
from ..cache.skipped import SkippedLayers
from ..hosts.models import named_arguments
from ..steps.run import RunReader


@dataclass(frozen=True)
class Call:
    """A U-Net call of a baseline run.

    Attributes:
        step: the number of its noise level in the run.
        level: that, in training timesteps.
        given: its arguments by name.
        output: what the U-Net returned.
        hidden: (B, C, H, W) what entered the last layer.
        early: whether its step is one of the early ones.
    """

    step: int
    level: float
    given: dict[str, Any]
    output: Any
    hidden: Tensor
    early: bool

    @property
    def sample(self) -> Tensor:
        """(B, C, H, W) the prediction."""
        return sample_of(self.output)


def record(
    pipe: Any, unet: Any, skipped: SkippedLayers, early_frac: float, run: Callable[[], Tensor]
) -> tuple[list[Call], Tensor]:
    """The U-Net's calls in `run`, whose first is of step 0, and what `run` returns.

    Args:
        pipe: the pipeline.
        unet: its U-Net.
        skipped: of it; its tap is in.
        early_frac: share of the steps that are early.
        run: runs the pipeline.
    """
    calls: list[Call] = []
    reader = RunReader(early_frac)

    def keep(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        given = named_arguments(unet, args, kwargs)
        read = reader.read(given["timestep"], pipe.scheduler)
        hidden = skipped.end()
        assert hidden is not None
        step = calls[-1].step + (read.timestep != calls[-1].level) if calls else 0
        # Copies, as pipelines may change theirs in place.
        calls.append(Call(step, read.timestep, *deepcopy((given, output)), hidden.clone(), read.early))

    hook = unet.register_forward_hook(keep, with_kwargs=True)
    try:
        latents = run()
    finally:
        hook.remove()
    return calls, latents


@contextmanager
def standing_in(module: Any, forward: Callable[..., Any]) -> Iterator[None]:
    """`forward(host, *args, **kwargs)` in place of a module's own, which is its first argument."""
    before, host = vars(module).get("forward"), module.forward
    module.forward = lambda *args, **kwargs: forward(host, *args, **kwargs)
    try:
        yield
    finally:
        del module.forward
        if before is not None:
            module.forward = before


@torch.no_grad()
def cached_step(unet: Any, skipped: SkippedLayers, given: dict[str, Any], hidden: Tensor) -> Tensor:
    """(B, C, H, W) the prediction of the last layers, on a state (B, C, H, W) that enters them."""
    skipped.begin(hidden)
    try:
        return sample_of(unet(**skipped.without_residuals(given)))
    finally:
        skipped.end()
