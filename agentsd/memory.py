"""What a run's calls leave for those after them: features, attention's residuals, given and right outputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module
from torch.utils._pytree import tree_leaves

from .attention.operator import Plan
from .attention.processor import AgentAttnProcessor
from .hosts import RESIDUALS
from .plan import FULL, KEEP, SHARE, Call, CallKind
from .presumed import ModelState, Trail, conditions_of
from .recipe import Recipe
from .sampler import ImpulseResponse, Sampler
from .skip import SkippedLayers
from .warn import WarnOnce

Select: TypeAlias = Callable[[list[Tensor]], list[Tensor]]
_MOST_CONDITIONS = 32
"""Texts, or other conditions, that a step's calls are told apart by."""
_NEGLIGIBLE = 1e-5  # of the largest response: below it is float32's rounding


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

    def newton_term(self, sigma: float | None) -> float:
        """By how many times one difference the features at a level moved when the last ones were kept.

        `extrapolate` gave them before, `interpolate` gives them now. One more level adds a term to Newton's
        form of the polynomial: the product of (sigma - level) over the levels before, times a difference that
        is the same for all sigma.
        """
        before = [level for level, _ in self._kept[:-1]]
        if sigma is None or None in before:
            return 1.0
        return float(np.prod([sigma - level for level in before[-self._order - 1 :] if level is not None]))

    def _at(self, sigma: float | None, kept: list[tuple[float | None, list[Tensor]]], select: Select) -> Any:
        """The method, 1 of 3: what a cached call computes its last layers on."""
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
    states of several cached steps in a row move by the same difference, times a number for each
    (`CachedFeatures.newton_term`); to first order their outputs do, too, so that one tells for all. By then
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
        self._right = begin  # the last call whose latent was right
        self._wrong: dict[int, Tensor] = {}  # (B, ...) by call: what it gave less what is right

    def note(self, calls: Sequence[Call], features: CachedFeatures, last: Tensor) -> None:
        """Take in the cached calls since the last computed one.

        Args:
            calls: with what each gave.
            features: those that are known now.
            last: (B, ...) what the last one's layers give on them.
        """
        moved, of_last = last - calls[-1].output, features.newton_term(calls[-1].sigma)
        for call in calls:  # the last output moved by that, and the others by a share of it
            share = min(1.0, features.newton_term(call.sigma) / of_last) if of_last else 1.0
            self._wrong[call.index] = call.given - self._best(call.index, call.output + share * moved)

    def correct(self, call: int, output: Tensor) -> Tensor:
        """The method, 2 of 3: what a computed call (B, ...) gives, so that the next latent is right.

        All calls before it are noted.
        """
        best, change = self._best(call, output), self._change(call)
        if change is None:
            return best
        self._wrong[call], self._right = change, call + 1
        later = np.any(self._weights(slice(call + 2, None)), axis=0)
        self._wrong = {one: wrong for one, wrong in self._wrong.items() if later[one]}
        return best + change

    def make_up(self, call: int, output: Tensor) -> Tensor:
        """What a cached call (B, ...) gives: its output, less what is wrong in the sampler's history."""
        change = self._change(call)
        return output if change is None else output + change

    def _best(self, call: int, output: Tensor) -> Tensor:
        """An output as it would be on the right latent."""
        sensitivity = self._sampler.sensitivity(call) * float(self._response.input_scale[call])
        moved = self._sum(sensitivity * self._weights(call))
        return output if moved is None else output - moved

    def _change(self, call: int) -> Tensor | None:
        """What a call's output changes by to make up for all that is wrong before it."""
        weights = self._weights(call + 1)
        own, weights[call] = weights[call], 0.0
        return self._sum(weights / -own) if own else None  # a last step may move nothing

    def _weights(self, at: int | slice) -> np.ndarray:
        """(..., calls) what a unit of each output's error adds to the latents `at`.

        The last right latent is right: what came before it shows in a multistep sampler's history alone.
        """
        outputs, latent = self._response.outputs, self._response.latent
        rows = outputs[at]
        if abs(latent[self._right]) > _NEGLIGIBLE:
            rows = rows - np.multiply.outer(latent[at] / latent[self._right], outputs[self._right])
        return np.where(np.abs(rows) > _NEGLIGIBLE * np.abs(outputs).max(), rows, 0.0)

    def _sum(self, weights: np.ndarray) -> Tensor | None:
        """The errors so far, weighted; None where there are none."""
        total: Tensor | None = None
        for call, wrong in self._wrong.items():
            if weight := float(weights[call]):
                total = wrong * weight if total is None else total.add(wrong, alpha=weight)
        return total


@dataclass(frozen=True)
class RunPlan:
    """What the calls of a run compute from one of them on; made whole at that call (`agentsd.planning`).

    Attributes:
        kinds: of the calls, by their place on the run's list; empty where nothing is cached.
        begin: the place of the first.
        stride: places from one call to the next.
        sampler: what is known of the run's scheduler.
        response: of that to each call's output; None where cached calls are not corrected.
        remark: what a user should know of that.
    """

    kinds: Mapping[int, CallKind] = field(default_factory=dict)
    begin: int = 0
    stride: int = 1
    sampler: Sampler = field(default_factory=lambda: Sampler(None, ()))
    response: ImpulseResponse | None = None
    remark: str = ""


@dataclass
class Memory:
    """What the calls of a run under the same conditions leave for those after them.

    Attributes:
        inputs: of its first call, held so that no other tensor gets the address of one of the conditions.
        trail: tells whether a call follows from the one before.
        features: where the last layers begin.
        warmup: how many of its first calls are computed, whatever is planned.
        residuals: of attention, where they are shared.
        corrections: of what cached calls got wrong, where the sampler's response is known.
        cached: the cached calls since the last computed one that are to be corrected.
        before: latent and output of its last call.
        index: of that, on the list of timesteps.
    """

    inputs: list[Any]
    trail: Trail
    features: CachedFeatures
    warmup: int
    residuals: Residuals | None
    corrections: Corrections | None
    cached: list[Call] = field(default_factory=list)
    before: tuple[Tensor, Tensor] | None = None
    index: int = -1


class RunCache:
    """What a run's calls leave for later ones, by all that they are computed from but latent and time.

    Args:
        plan: of the run.
        recipe: says what is kept.
        layers: that share residuals.
        skipped: what cached calls skip.
        warn: warns the user, once of each thing.

    Attributes:
        memories: by conditions.
    """

    def __init__(
        self,
        plan: RunPlan,
        recipe: Recipe,
        layers: Sequence[AgentAttnProcessor],
        skipped: SkippedLayers,
        warn: WarnOnce,
    ) -> None:
        self._plan, self._kinds, self._recipe = plan, plan.kinds, recipe
        self._layers, self._skipped, self._warn = layers, skipped, warn
        self.memories: dict[Any, Memory] = {}
        self._model: ModelState | None = None
        self._conditions: dict[str, Any] = {}  # of the last call, by name
        self._unmatched = 0  # for how many steps in a row nothing that was kept could be used

    def memory_of(self, unet: Module, call: Call) -> Memory | None:
        """What earlier calls left that a call may use, and where it leaves its own; completes its kind.

        None where it computes all layers and leaves nothing.
        """
        if self._recipe.residual is not None:
            call.kind = CallKind(attention=FULL)
        if call.off_list and self._kinds:
            self._warn(
                "a timestep is not one of the scheduler's list, so its call computes all layers; pass "
                "elements of scheduler.timesteps to the U-Net"
            )
        if call.off_list or call.index not in self._kinds:
            return None
        if torch.is_grad_enabled():
            self.memories.clear()
            self._warn(
                "gradients are on, under which no layer is skipped; call the U-Net under torch.no_grad() to "
                "skip some"
            )
            return None
        memory = self._matching(unet, call)
        if memory is None:
            return None
        planned, sigmas = self._kinds[call.index], self._plan.sampler.sigmas
        computed, attention = planned.computed or len(memory.features) < memory.warmup, planned.attention
        residuals = memory.residuals
        if attention == SHARE and residuals is not None and residuals.stage != call.stage:
            attention = KEEP if computed else FULL  # there are none yet, or they are another operator's
        call.kind, call.sigma = CallKind(computed, attention), sigmas[call.index] if sigmas else None
        memory.index = call.index
        return memory

    def _matching(self, unet: Module, call: Call) -> Memory | None:
        """The memory of a call's conditions, a new one where it follows from no other."""
        plan = self._plan
        oldest = call.index - plan.stride  # what was not called in the step before is too old
        self.memories = {key: one for key, one in self.memories.items() if one.index >= oldest}
        self._model = self._model or ModelState(unet)
        before, conditions = self._conditions, conditions_of(call, self._model)
        self._conditions, key = conditions, tuple(conditions.items())
        memory = self.memories.get(key)
        if memory is None:
            if not self._skipped.are_in(unet):
                other = "the U-Net has other blocks than when agentsd was applied (apply it again)"
                return self._give_up(other)
            changed = [name for name in before | conditions if before.get(name) != conditions.get(name)]
            broken = f"{' and '.join(changed)} changed"
        elif memory.index == call.index:
            return self._give_up("the U-Net is called more than once in a step on the same text")
        elif not (broken := memory.trail.broken(call, memory.before, self._kinds[call.index].computed)):
            self._unmatched = 0
            return memory
        others = [one for one in self.memories.values() if one.index == call.index]
        self._unmatched += not others  # the step's first call
        if self._unmatched == 3 or len(others) == _MOST_CONDITIONS:
            return self._give_up(f"in {len(others) or 3} calls in succession {broken}")
        if call.index > plan.begin:
            self._warn(f"{broken}, so a call computes all layers")
        memory = self.memories[key] = self._new(call, memory, self._model)
        return memory

    def _new(self, call: Call, old: Memory | None, model: ModelState) -> Memory:
        """A memory that begins with a call; of an old one it takes the trail, which has a call before."""
        plan, steps, residual = self._plan, self._recipe.steps, self._recipe.residual
        order, response = 0 if steps is None else steps.extrapolation_order, plan.response
        deterministic = response is not None and not response.noisy
        trail = Trail(plan.sampler.new_noise(deterministic), model.samples) if old is None else old.trail
        # But for the call's own inputs, which are large and told by no address.
        held = [one for name, one in call.inputs.items() if name not in RESIDUALS and one is not call.latent]
        return Memory(
            tree_leaves(held),
            trail,
            CachedFeatures(order, interpolates=response is not None),
            1 if call.index == plan.begin else order + 1,  # no warm-up is planned there
            None if residual is None else Residuals(self._layers, residual.extrapolation_order),
            None if response is None else Corrections(plan.sampler, response, plan.begin),
        )

    def _give_up(self, reason: str) -> Memory | None:
        self._kinds, self.memories = {}, {}
        self._warn(f"{reason}; nothing more is skipped in this run")
        return None

    def drop(self, memory: Memory) -> None:
        """Let go of a memory; of the model, too, where none is left."""
        self.memories = {key: other for key, other in self.memories.items() if other is not memory}
        self._model = self._model if self.memories else None
