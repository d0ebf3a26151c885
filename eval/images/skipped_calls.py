"""Peers that skip whole U-Net calls. Their rules are written out: no package brings them to diffusers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from diffusers.models.unets.unet_2d_condition import UNet2DConditionOutput
from torch import Tensor

Predict = Callable[[], Tensor]
"""A call's prediction (B, 4, h, w), as the model computes it."""


class Spectrum:
    """Spectrum (Han et al., CVPR 2026): the last hidden state, forecast over the full steps of a run.

    A forecast is the mean of two: a ridge regression on Chebyshev polynomials of the step over all computed
    states, and the line through the last two. The settings are those of the authors' script for SDXL, their
    time axis of 50 steps included. Their code rounds coefficients to bfloat16, this does not.

    Args:
        window: one full step in so many after the warm-up; it grows with each.
    """

    WARMUP, GROWTH, DEGREE, RIDGE, SHARE, SPAN = 5, 0.75, 4, 0.1, 0.5, 50

    def __init__(self, unet: Any, window: int) -> None:
        self._unet, self._window = unet, float(window)
        self._step = self._skipped = 0
        self._known: list[tuple[int, Tensor]] = []

    def __call__(self, sample: Tensor, timestep: float, predict: Predict) -> Tensor:
        """A call's prediction, computed or forecast."""
        step, self._step = self._step, self._step + 1
        if step >= self.WARMUP and (self._skipped + 1) % int(self._window):
            self._skipped += 1
            return self._out(self.forecast(step))
        self._window += self.GROWTH * (step >= self.WARMUP)
        self._skipped = 0
        hook = self._unet.conv_norm_out.register_forward_pre_hook(
            lambda module, args: self._known.append((step, args[0].detach().clone()))
        )
        try:
            return predict()
        finally:
            hook.remove()

    def forecast(self, step: int) -> Tensor:
        """(B, C, h, w) the hidden state of a step."""
        steps = torch.tensor([known for known, _ in self._known], dtype=torch.float64)
        (before, _), (last, newest) = self._known[-2:]
        design = self._chebyshev(steps)
        gram = design.mT @ design + self.RIDGE * torch.eye(self.DEGREE + 1, dtype=torch.float64)
        point = self._chebyshev(torch.tensor([step], dtype=torch.float64))
        weights = self.SHARE * (point @ torch.linalg.solve(gram, design.mT))[0]
        ahead = (step - last) / (last - before)
        weights[-1] += (1 - self.SHARE) * (1 + ahead)
        weights[-2] -= (1 - self.SHARE) * ahead
        total = torch.zeros_like(newest)
        for weight, (_, one) in zip(weights.tolist(), self._known, strict=True):
            total.add_(one, alpha=weight)
        return total

    def _chebyshev(self, steps: Tensor) -> Tensor:
        """(N, DEGREE + 1) the polynomials at steps (N)."""
        x = 2 * steps / self.SPAN - 1
        columns = [torch.ones_like(x), x]
        while len(columns) <= self.DEGREE:
            columns.append(2 * x * columns[-1] - columns[-2])
        return torch.stack(columns, -1)

    def _out(self, hidden: Tensor) -> Tensor:
        unet = self._unet
        prediction: Tensor = unet.conv_out(unet.conv_act(unet.conv_norm_out(hidden)))
        return prediction


class EasyCache:
    """EasyCache (Zhou et al., 2025) as ComfyUI has it: a call is skipped while the input has changed little.

    What a skipped call adds to its input is what the last computed one added. The change of the output is
    guessed from that of the input by the ratio of the two at the last full call. ComfyUI looks at the
    first condition alone, this at the whole batch.

    Args:
        threshold: in hundredths of the output's mean, what skipped calls may add up to.
    """

    START, END, STRIDE = 0.15, 0.95, 8

    def __init__(self, unet: Any, threshold: int) -> None:
        self._threshold, self._added = threshold / 100, 0.0
        self._before: tuple[Tensor, Tensor] | None = None
        self._rate: Tensor | None = None
        self._looks = False

    def __call__(self, sample: Tensor, timestep: float, predict: Predict) -> Tensor:
        """A call's prediction, computed or guessed."""
        share = 1 - timestep / 999
        if share >= self.END:
            return predict()
        change = None
        if share >= self.START:
            if self._looks and self._before is not None:
                change = self._distance(sample, self._before[0])
            self._looks = True
        if change is not None and self._before is not None and self._rate is not None:
            before, output = self._before
            self._added += float(self._rate * change / output.abs().mean())
            if self._added < self._threshold:
                return sample + (output - before)
            self._added = 0.0
        prediction = predict()
        if change is not None and self._before is not None:
            self._rate = self._distance(prediction, self._before[1]) / change
        self._before = sample.detach().clone(), prediction.detach().clone()
        return prediction

    def _distance(self, x: Tensor, y: Tensor) -> Tensor:
        """The mean absolute difference at every eighth position each way."""
        return (x - y)[..., :: self.STRIDE, :: self.STRIDE].abs().mean()


@contextmanager
def skipped_calls(pipe: Any, number: int, seed: int, rule: Callable[[Any, int], Any]) -> Iterator[None]:
    """Let a rule make a U-Net's calls; a run begins where the timestep rises."""
    unet = getattr(pipe, "unet", pipe)
    forward, last, own = unet.forward, -1.0, None

    def call(sample: Tensor, timestep: Any, *args: Any, return_dict: bool = True, **kwargs: Any) -> Any:
        nonlocal last, own
        t = float(timestep)
        if own is None or t > last:
            own = rule(unet, number)
        last = t
        prediction = own(sample, t, lambda: forward(sample, timestep, *args, return_dict=False, **kwargs)[0])
        return UNet2DConditionOutput(sample=prediction) if return_dict else (prediction,)

    before = vars(unet).get("forward")
    unet.forward = call
    try:
        yield
    finally:
        del unet.forward
        if before is not None:
            unet.forward = before
