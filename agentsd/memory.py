"""What a run's calls leave for those after them: features, attention's residuals, given and right outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from .attention.operator import Plan
from .attention.processor import LayerState
from .plan import COMPUTED, FULL, SHARE, StepKind
from .sampler import ImpulseResponse, Sampler

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


class Corrections:
    """What the outputs given in a run are wrong by, and what takes the sampler to where it would have been.

    A cached step's hidden state is extrapolated from computed steps before it. The next computed step shows
    the state on the other side: on the state between, the same layers tell how wrong the output was. By then
    the sampler has moved the latent by it. With R the sampler's impulse response (`agentsd.sampler`), the
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

    def note(self, call: int, given: Tensor, output: Tensor) -> None:
        """Take in what a cached call gave, and what its layers give on the features that are known now."""
        self._wrong[call] = given - self._best(call, output)

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
class CacheEntry:
    """What the calls of a run on one text and one shape of latents keep.

    Attributes:
        text: held, so that no other tensor gets its address.
        features: where the last layers begin.
        residuals: of attention, where they are shared.
        corrections: of what cached calls got wrong, where the sampler's response is known.
        cached: the cached calls since the last computed one that are to be corrected.
        step_index: in the scheduler's list, of its last call.
    """

    text: Any
    features: CachedFeatures
    residuals: Residuals | None = None
    corrections: Corrections | None = None
    cached: list[StepContext] = field(default_factory=list)
    step_index: int = -1


@dataclass
class StepContext:
    """A call of the denoiser.

    Attributes:
        latent: (B, ..., H, W) what it is called on.
        timestep: its noise level, in training timesteps.
        index: its place on the run's list of timesteps.
        stage: which of the recipe's operators run in it.
        inputs: its arguments by name, where something is cached.
        kind: what it computes.
        sigma: its noise level, as features are kept by.
        entry: where its features are kept; None if they are not.
        is_last: it is in the last step of its run.
        given: (B, ...) what a cached call gave, until it is corrected.
    """

    latent: Tensor
    timestep: float
    index: int
    stage: int
    inputs: dict[str, Any] = field(default_factory=dict)
    kind: StepKind = COMPUTED
    sigma: float | None = None
    entry: CacheEntry | None = None
    is_last: bool = False
    given: Tensor | None = None

    @property
    def residuals(self) -> Residuals | None:
        """Attention's, where they are shared."""
        return None if self.entry is None else self.entry.residuals
