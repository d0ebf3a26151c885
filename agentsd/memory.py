"""What a run's calls leave for those after them: features, attention's residuals, given and right outputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from .attention.operator import Plan
from .attention.processor import AgentAttnProcessor
from .plan import FULL, KEEP, SHARE, Call, CallKind
from .presumed import Trail
from .sampler import ImpulseResponse, Sampler

Select: TypeAlias = Callable[[list[Tensor]], list[Tensor]]


class CachedFeatures:
    """The features of the last computed steps, with the noise level of each: a list of tensors a step.

    Between and after them they are on a polynomial over sigma: before the next step is computed on that
    through `order + 1` of them, which extrapolates, and then on that through one more, which interpolates.

    Args:
        order: 0 keeps features as they were; 1 extrapolates them linearly.
        interpolates: one more step is kept.
    """

    def __init__(self, order: int, interpolates: bool = False) -> None:
        self._order, self._count = order, order + 1 + interpolates
        self._kept: list[tuple[float | None, list[Tensor]]] = []

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, sigma: float | None, features: list[Tensor]) -> None:
        """Take in a computed step's features; a repeated noise level replaces the one before."""
        others = [kept for kept in self._kept if sigma is None or not _same(kept[0], sigma)]
        self._kept = [*others, (sigma, features)][-self._count :]

    def extrapolate(self, sigma: float | None, select: Select = list) -> list[Tensor]:
        """The features at a noise level after the last.

        Args:
            sigma: the noise level.
            select: takes those that are wanted from a step's.
        """
        return self._at(sigma, self._kept[-self._order - 1 :], select)

    def interpolate(self, sigma: float | None, select: Select = list) -> list[Tensor]:
        """The features at a noise level before the last."""
        return self._at(sigma, self._kept, select)

    def change(self, sigma: float | None) -> float:
        """How far `interpolate` now moves the features that `extrapolate` gave before the last was kept.

        That is Newton's next term: a difference that is the same everywhere, times this.
        """
        before = [level for level, _ in self._kept[:-1]]
        if sigma is None or None in before:
            return 1.0
        return float(np.prod([sigma - level for level in before[-self._order - 1 :] if level is not None]))

    def _at(self, sigma: float | None, kept: list[tuple[float | None, list[Tensor]]], select: Select) -> Any:
        levels = [level for level, _ in kept if level is not None]
        newest = select(kept[-1][1])
        if not newest or sigma is None or len(levels) < len(kept) or len(kept) == 1:
            return newest
        weights = [_lagrange(levels, i, sigma) for i in range(len(levels))]
        total = torch._foreach_mul(newest, weights[-1])
        for weight, (_, features) in zip(weights[:-1], kept[:-1], strict=True):
            torch._foreach_add_(total, select(features), alpha=weight)
        return list(total)


def _same(level: float | None, sigma: float) -> bool:
    """Whether two noise levels are one but for rounding, as those of KDPM2's pairs of calls."""
    return level is not None and math.isclose(level, sigma, rel_tol=1e-4)


def _lagrange(levels: Sequence[float], i: int, at: float) -> float:
    """The weight of the value at `levels[i]` in the polynomial through all."""
    others = [level for j, level in enumerate(levels) if j != i]
    return float(np.prod([(at - other) / (levels[i] - other) for other in others]))


class Residuals:
    """The residuals of some layers, for the images of a text and a shape of latents.

    Args:
        layers: the patched layers.
        order: 0 keeps a residual as it was; 1 extrapolates it linearly.

    Attributes:
        stage: whose operators they are of; None while there are none.
        plans: that the layers had with the last residual, by group.
    """

    def __init__(self, layers: Sequence[AgentAttnProcessor], order: int) -> None:
        self._layers, self._order = layers, order
        self._kept = CachedFeatures(order)
        self._found: list[AgentAttnProcessor] = []  # the layers that have one, in its order
        self.plans: dict[int, Plan] = {}
        self.stage: int | None = None

    def keep(self, sigma: float | None, stage: int, plans: dict[int, Plan]) -> None:
        """Take in what the layers found in a call at a noise level, in this stage of the run."""
        found = [layer for layer in self._layers if layer.residual is not None]
        if self.stage != stage or self._found != found:  # another operator's, or of other layers
            self._kept = CachedFeatures(self._order)
        self._kept.keep(sigma, [layer.residual for layer in found if layer.residual is not None])
        self._found, self.stage, self.plans = found, stage, plans

    def give(self, sigma: float | None, interpolate: bool, cached: bool) -> None:
        """Hand each layer that is computed its residual at a noise level; without one attention is full.

        Args:
            sigma: the noise level.
            interpolate: the level is between the last two, whatever the order.
            cached: the call skips layers.
        """
        for layer in self._layers:
            layer.residual, layer.attention = None, FULL
        given = [i for i, layer in enumerate(self._found) if not (cached and layer.skipped)]
        at = self._kept.interpolate if interpolate else self._kept.extrapolate
        residuals = at(sigma, lambda kept: [kept[i] for i in given])
        for i, residual in zip(given, residuals, strict=True):
            self._found[i].residual, self._found[i].attention = residual, SHARE


class Corrections:
    """What the outputs given in a run are wrong by, and what takes the sampler to where it would have been.

    A cached step's hidden state is extrapolated from computed steps before it. The next computed step shows
    the state on the other side: on the state between, the same layers tell how wrong the output was. The
    states of several cached steps in a row change by the same difference, times a number for each
    (`CachedFeatures.change`); to first order their outputs do, too, so that one tells for all. By then
    the sampler has moved the latent by that. With R the sampler's impulse response (`agentsd.sampler`), the
    latent of call n is off by the sum of R[n, j] wrong[j]. So call n gives

        best - sum_{j<n} R[n + 1, j] wrong[j] / R[n + 1, n]

    and the next latent is right, to rounding, whatever the sampler; so does every call after it, as multistep
    samplers keep what they were given. What was wrong with the latent of call n itself has moved its output:
    by dF/dx of Gaussian data, which `best` is without.

    Args:
        sampler: of the run.
        response: its impulse response.
        begin: the index of the run's first call.
    """

    def __init__(self, sampler: Sampler, response: ImpulseResponse, begin: int) -> None:
        self._sampler, self._response = sampler, response
        self._since = begin  # the last call whose latent was right
        self._wrong: dict[int, Tensor] = {}  # (B, ...) by call: what it gave less what is right

    def note(self, calls: Sequence[Call], features: CachedFeatures, last: Tensor) -> None:
        """Take in the cached calls since the last computed one.

        Args:
            calls: with what each gave.
            features: those that are known now.
            last: (B, ...) what the last one's layers give on them.
        """
        change, its_share = last - calls[-1].output, features.change(calls[-1].sigma)
        for call in calls:
            share = min(1.0, features.change(call.sigma) / its_share) if its_share else 1.0
            self._wrong[call.index] = call.given - self._best(call.index, call.output + share * change)

    def correct(self, call: int, output: Tensor) -> Tensor:
        """What a computed call (B, ...) gives, all calls before it being noted: the next latent is right."""
        best, change = self._best(call, output), self._change(call)
        if change is None:
            return best
        self._wrong[call] = change
        self._since = call + 1
        shown = np.any(self._response.weights(slice(call + 2, None), self._since), axis=0)
        self._wrong = {one: wrong for one, wrong in self._wrong.items() if shown[one]}
        return best + change

    def make_up(self, call: int, output: Tensor) -> Tensor:
        """What a cached call (B, ...) gives: its output, less what is wrong in the sampler's history."""
        change = self._change(call)
        return output if change is None else output + change

    def _best(self, call: int, output: Tensor) -> Tensor:
        """An output as it would be on the right latent."""
        gain = self._sampler.gain(call) * float(self._response.input_scale[call])
        error = self._sum(gain * self._response.weights(call, self._since))
        return output if error is None else output - error

    def _change(self, call: int) -> Tensor | None:
        """What a call's output changes by to make up for all that is wrong before it."""
        weights = self._response.weights(call + 1, self._since)
        own, weights[call] = weights[call], 0.0
        return self._sum(weights / -own) if own else None  # a last step may move nothing

    def _sum(self, weights: np.ndarray) -> Tensor | None:
        """The errors so far, weighted; None where there are none."""
        total: Tensor | None = None
        for call, wrong in self._wrong.items():
            if weight := float(weights[call]):
                total = wrong * weight if total is None else total.add(wrong, alpha=weight)
        return total


@dataclass
class Memory:
    """What the calls of a run under the same conditions leave for those after them.

    Attributes:
        inputs: of its first call, held so that no other tensor gets the address of one of the conditions.
        trail: tells whether a call follows from the one before.
        features: where the last layers begin.
        residuals: of attention, where they are shared.
        corrections: of what cached calls got wrong, where the sampler's response is known.
        cached: the cached calls since the last computed one that are to be corrected.
        warmup: how many of its first calls are computed, whatever is planned.
        index: of its last call, on the list of timesteps.
    """

    inputs: list[Any]
    trail: Trail
    features: CachedFeatures
    residuals: Residuals | None = None
    corrections: Corrections | None = None
    cached: list[Call] = field(default_factory=list)
    warmup: int = 1
    index: int = -1

    def decide(self, planned: CallKind, stage: int) -> CallKind:
        """What a call computes: what is planned, or more where what that needs is not known yet."""
        computed, attention = planned.computed or len(self.features) < self.warmup, planned.attention
        fits = self.residuals is None or self.residuals.stage == stage  # else they are another operator's
        if attention == SHARE and not fits:
            attention = KEEP if computed else FULL
        return CallKind(computed, attention)
