"""Whole U-Net calls left out, and the clean latent forecast in their place: tried, and beaten by fewer steps.

It stands here so that its row can be made again; SADA and AdaptiveDiffusion leave calls out in this way.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

FULL_AT_FIRST = 4
"""Calls of a run that are computed before any is left out, as `mode="fast"` has it."""


class Forecast:
    """A U-Net's `forward` that computes one call in `every` and forecasts the others.

    A forecast call extrapolates the clean latents of the last two computed ones linearly over the noise
    level sigma, and gives the prediction that would lead there from the latents at hand.
    """

    def __init__(self, forward: Any, scheduler: Any, every: int) -> None:
        self._forward, self._every = forward, every
        self._alphas = scheduler.alphas_cumprod
        self._type = scheduler.config.prediction_type
        self._known: list[tuple[float, Tensor]] = []
        self._calls, self._timestep = 0, -1.0

    def __call__(self, sample: Tensor, timestep: Any, *args: Any, **kwargs: Any) -> Any:
        """What the U-Net's own `forward` takes and gives as a tuple."""
        level = float(timestep)
        if level > self._timestep:  # another run
            self._known, self._calls = [], 0
        self._timestep = level
        place, self._calls = self._calls - FULL_AT_FIRST, self._calls + 1
        alpha = float(self._alphas[round(level)])
        sigma = ((1 - alpha) / alpha) ** 0.5
        if place < 0 or place % self._every == 0:
            output = self._forward(sample, timestep, *args, **kwargs)
            self._known = [*self._known[-1:], (sigma, self._clean(sample, output[0], alpha))]
            return output
        (first, one), (second, other) = self._known
        clean = other + (sigma - second) / (second - first) * (other - one)
        return (self._prediction(sample, clean, alpha),)

    def _clean(self, sample: Tensor, output: Tensor, alpha: float) -> Tensor:
        if self._type == "v_prediction":
            return alpha**0.5 * sample - (1 - alpha) ** 0.5 * output
        return (sample - (1 - alpha) ** 0.5 * output) / alpha**0.5

    def _prediction(self, sample: Tensor, clean: Tensor, alpha: float) -> Tensor:
        noise = (sample - alpha**0.5 * clean) / (1 - alpha) ** 0.5
        return alpha**0.5 * noise - (1 - alpha) ** 0.5 * clean if self._type == "v_prediction" else noise


@contextmanager
def forecast(pipe: Any, every: int) -> Iterator[None]:
    """Leave all but one call in `every` of a pipeline's U-Net out, after the first four.

    For samplers on SD's own noise levels that make one call a step, such as DPM++ 2M and DDIM.
    """
    unet = pipe.unet
    unet.forward = torch.no_grad()(Forecast(unet.forward, pipe.scheduler, every).__call__)
    try:
        yield
    finally:
        del unet.forward
