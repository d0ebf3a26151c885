"""What the calls of a run leave for later calls: features, attention residuals, and errors to correct."""

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
"""Most texts, or other conditions, that the calls of one step may differ in."""
_NEGLIGIBLE = 1e-5  # share of the largest response; anything smaller is float32 rounding


class CachedFeatures:
    """The features of the last full steps, a list of tensors for each, with their noise levels.

    Features at other noise levels are read off a polynomial in sigma. Until the next full step, it
    goes through the last `order + 1` of them and extrapolates. Afterwards it goes through one more and
    interpolates.

    Args:
        order: 0 keeps features as they were; 1 extrapolates them linearly.
        interpolates: whether to keep one more step, for `interpolate`.
    """

    def __init__(self, order: int, interpolates: bool = False) -> None:
        self._order, self._count = order, order + 1 + interpolates
        self._kept: list[tuple[float | None, list[Tensor]]] = []

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, sigma: float | None, features: list[Tensor]) -> None:
        """Store a full step's features; at a noise level that is already stored they replace the old."""
        others = [kept for kept in self._kept if sigma is None or not _same(kept[0], sigma)]
        self._kept = [*others, (sigma, features)][-self._count :]

    def extrapolate(self, sigma: float | None, select: Select = list) -> list[Tensor]:
        """Return the features at a noise level after the last one.

        Args:
            sigma: the noise level.
            select: picks the wanted features from a step's list.
        """
        return self._at(sigma, self._kept[-self._order - 1 :], select)

    def interpolate(self, sigma: float | None, select: Select = list) -> list[Tensor]:
        """Return the features at a noise level before the last one."""
        return self._at(sigma, self._kept, select)

    def newton_term(self, sigma: float | None) -> float:
        """Return a number proportional to how far features at a noise level moved when the last were stored.

        They moved from what `extrapolate` gave then to what `interpolate` gives now. In Newton's form of
        the polynomial that is one more term: the product of (sigma - level) over the earlier levels, times
        a difference that is the same for all sigma. The product is returned.
        """
        before = [level for level, _ in self._kept[:-1]]
        if sigma is None or None in before:
            return 1.0
        return float(np.prod([sigma - level for level in before[-self._order - 1 :] if level is not None]))

    def _at(self, sigma: float | None, kept: list[tuple[float | None, list[Tensor]]], select: Select) -> Any:
        """The method, part 1 of 3: the features on which a cached call computes its last layers."""
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
    """Return whether two noise levels are equal up to rounding, as in KDPM2's pairs of calls."""
    return level is not None and math.isclose(level, sigma, rel_tol=1e-4)


def _lagrange(levels: Sequence[float], i: int, at: float) -> float:
    """Return the weight of the value at `levels[i]` in the polynomial through all levels."""
    others = [level for j, level in enumerate(levels) if j != i]
    return float(np.prod([(at - other) / (levels[i] - other) for other in others]))


class Residuals:
    """The residuals of attention layers, for one text and one shape of latents.

    Args:
        layers: the patched layers.
        order: 0 keeps a residual as it was; 1 extrapolates it linearly.

    Attributes:
        stage: the stage whose operators the residuals belong to; None while there are none.
        plans: the layers' plans when the last residuals were stored, by group.
    """

    def __init__(self, layers: Sequence[AgentAttnProcessor], order: int) -> None:
        self._layers, self._order = layers, order
        self._kept = CachedFeatures(order)
        self._found: list[AgentAttnProcessor] = []  # the layers that have a residual, in order
        self.plans: dict[int, Plan] = {}
        self.stage: int | None = None

    def keep(self, sigma: float | None, stage: int, plans: dict[int, Plan]) -> None:
        """Store the residuals that the layers computed in a call of this noise level and stage."""
        found = [layer for layer in self._layers if layer.residual is not None]
        if self.stage != stage or self._found != found:  # the old ones are of another operator or layers
            self._kept = CachedFeatures(self._order)
        self._kept.keep(sigma, [layer.residual for layer in found if layer.residual is not None])
        self._found, self.stage, self.plans = found, stage, plans

    def give(self, sigma: float | None, interpolate: bool, cached: bool) -> None:
        """Give each layer of a call its residual at a noise level; a layer without one attends in full.

        Args:
            sigma: the noise level.
            interpolate: whether the level lies between the last two, whatever the order.
            cached: whether the call skips layers.
        """
        for layer in self._layers:
            layer.residual, layer.attention = None, FULL
        given = [i for i, layer in enumerate(self._found) if not (cached and layer.skipped)]
        at = self._kept.interpolate if interpolate else self._kept.extrapolate
        residuals = at(sigma, lambda kept: [kept[i] for i in given])
        for i, residual in zip(given, residuals, strict=True):
            self._found[i].residual, self._found[i].attention = residual, SHARE


class Corrections:
    """The errors of the outputs given in a run, and the outputs that undo what the errors did to the latent.

    A cached call computes its last layers on an extrapolated hidden state. The next full call shows the
    state on the other side, so the state in between is now known much better. Computing the last layers
    once more on that state shows the error of the cached output. This is done for the last cached call
    alone: in a row of cached calls all states move by the same difference, each times a known number
    (`CachedFeatures.newton_term`), and to first order so do the outputs.

    By then the sampler has carried the errors into the latent. With R the sampler's impulse response
    (`agentsd.sampler`), the latent of call n is off by the sum of R[n, j] error[j]. So call n returns

        best - sum_{j<n} R[n + 1, j] error[j] / R[n + 1, n]

    and the next latent is where the right outputs, as they are estimated, would have taken it, up to rounding
    and whatever the sampler. Every later call does the same, as
    multistep samplers remember the outputs they were given. The latent of call n itself was wrong, too,
    which changed the call's output by dF/dx of Gaussian data. `best` is the output without that change.

    Args:
        sampler: the run's sampler.
        response: its impulse response.
        begin: the index of the run's first call.
    """

    def __init__(self, sampler: Sampler, response: ImpulseResponse, begin: int) -> None:
        self._sampler, self._response = sampler, response
        self._right = begin  # the last call whose latent was right
        self._errors: dict[int, Tensor] = {}  # (B, ...) by call: the output it gave minus the right one

    def note(self, calls: Sequence[Call], features: CachedFeatures, last: Tensor) -> None:
        """Work out the errors of the cached calls since the last full one.

        Args:
            calls: the cached calls, with the output that each gave.
            features: what is known now.
            last: (B, ...) the output of the last of these calls, computed again on these features.
        """
        moved, of_last = last - calls[-1].output, features.newton_term(calls[-1].sigma)
        for call in calls:  # the last output moved by `moved`, the others by a share of it
            share = min(1.0, features.newton_term(call.sigma) / of_last) if of_last else 1.0
            self._errors[call.index] = call.given - self._best(call.index, call.output + share * moved)

    def correct(self, call: int, output: Tensor) -> Tensor:
        """The method, part 2 of 3: the output (B, ...) of a full call that makes the next latent right.

        The errors of all earlier calls must be known.
        """
        best, change = self._best(call, output), self._change(call)
        if change is None:
            return best
        self._errors[call], self._right = change, call + 1
        later = np.any(self._weights(slice(call + 2, None)), axis=0)
        self._errors = {one: error for one, error in self._errors.items() if later[one]}
        return best + change

    def make_up(self, call: int, output: Tensor) -> Tensor:
        """Return the output (B, ...) of a cached call, minus the known errors in the sampler's history."""
        change = self._change(call)
        return output if change is None else output + change

    def _best(self, call: int, output: Tensor) -> Tensor:
        """Return an output as it would be on the right latent."""
        sensitivity = self._sampler.sensitivity(call) * float(self._response.input_scale[call])
        moved = self._sum(sensitivity * self._weights(call))
        return output if moved is None else output - moved

    def _change(self, call: int) -> Tensor | None:
        """Return the change of a call's output that makes up for all earlier errors."""
        weights = self._weights(call + 1)
        own, weights[call] = weights[call], 0.0
        return self._sum(weights / -own) if own else None  # a last step may move nothing

    def _weights(self, at: int | slice) -> np.ndarray:
        """(..., calls) what a unit error of each output adds to the latents `at`.

        Errors from before the last right latent act only through a multistep sampler's history.
        """
        outputs, latent = self._response.outputs, self._response.latent
        rows = outputs[at]
        if abs(latent[self._right]) > _NEGLIGIBLE:
            rows = rows - np.multiply.outer(latent[at] / latent[self._right], outputs[self._right])
        return np.where(np.abs(rows) > _NEGLIGIBLE * np.abs(outputs).max(), rows, 0.0)

    def _sum(self, weights: np.ndarray) -> Tensor | None:
        """Return the weighted sum of the known errors; None if there are none."""
        total: Tensor | None = None
        for call, error in self._errors.items():
            if weight := float(weights[call]):
                total = error * weight if total is None else total.add(error, alpha=weight)
        return total


@dataclass(frozen=True)
class RunPlan:
    """What each call of a run computes; made as a whole at the first of these calls (`agentsd.planning`).

    Attributes:
        kinds: the kind of each call, by its place in the list of timesteps; empty if nothing is cached.
        begin: the place of the first call.
        stride: places from one call to the next.
        sampler: what is known of the run's scheduler.
        response: the sampler's impulse response; None if cached calls are not corrected.
        remark: what the user should know about that.
    """

    kinds: Mapping[int, CallKind] = field(default_factory=dict)
    begin: int = 0
    stride: int = 1
    sampler: Sampler = field(default_factory=lambda: Sampler(None, ()))
    response: ImpulseResponse | None = None
    remark: str = ""


@dataclass
class Memory:
    """What the calls of a run leave for later calls with the same conditions.

    Attributes:
        inputs: the first call's arguments, held so that no other tensor can get the address of a condition.
        trail: checks that a call follows from the one before.
        features: the hidden states that enter the last layers.
        warmup: how many features must be stored before a call may be cached, whatever the plan says.
        residuals: residuals of attention, if they are shared.
        corrections: the errors of cached calls, if the sampler's response is known.
        cached: the cached calls since the last full one, which are still to be corrected.
        before: latent and output of the last call.
        index: the last call's place in the list of timesteps.
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
    """The memories of a run, one for each set of conditions: all arguments but the latent and the time.

    Args:
        plan: the run's plan.
        recipe: says what is kept.
        layers: the layers that share residuals.
        skipped: the layers that cached calls skip.
        warn: warns the user, once about each thing.

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
        self._conditions: dict[str, Any] = {}  # the last call's, by name
        self._unmatched = 0  # number of steps in a row in which no memory could be used

    def memory_of(self, unet: Module, call: Call) -> Memory | None:
        """Return the memory that a call reads and writes, and set the call's kind.

        None if the call computes all layers and leaves nothing.
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
        full, attention = planned.full or len(memory.features) < memory.warmup, planned.attention
        residuals = memory.residuals
        if attention == SHARE and residuals is not None and residuals.stage != call.stage:
            attention = KEEP if full else FULL  # no residual of this operator is known yet
        call.kind, call.sigma = CallKind(full, attention), sigmas[call.index] if sigmas else None
        memory.index = call.index
        return memory

    def _matching(self, unet: Module, call: Call) -> Memory | None:
        """Return the memory of a call's conditions; a new one if the call doesn't follow from the last."""
        plan = self._plan
        oldest = call.index - plan.stride  # conditions that the previous step didn't use are too old
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
        elif not (broken := memory.trail.broken(call, memory.before, self._kinds[call.index].full)):
            self._unmatched = 0
            return memory
        others = [one for one in self.memories.values() if one.index == call.index]
        self._unmatched += not others  # counted once a step
        if self._unmatched == 3 or len(others) == _MOST_CONDITIONS:
            return self._give_up(f"in {len(others) or 3} calls in succession {broken}")
        if call.index > plan.begin:
            self._warn(f"{broken}, so a call computes all layers")
        memory = self.memories[key] = self._new(call, memory, self._model)
        return memory

    def _new(self, call: Call, old: Memory | None, model: ModelState) -> Memory:
        """Return a memory that begins with this call; it takes over the trail of an old one."""
        plan, steps, residual = self._plan, self._recipe.steps, self._recipe.residual
        order, response = 0 if steps is None else steps.extrapolation_order, plan.response
        deterministic = response is not None and not response.noisy
        trail = Trail(plan.sampler.new_noise(deterministic), model.samples) if old is None else old.trail
        # All but the latent and ControlNet's residuals: they are large, and not recognised by their address.
        held = [one for name, one in call.inputs.items() if name not in RESIDUALS and one is not call.latent]
        return Memory(
            tree_leaves(held),
            trail,
            CachedFeatures(order, interpolates=response is not None),
            1 if call.index == plan.begin else order + 1,  # the plan has no warm-up in mid-run
            None if residual is None else Residuals(self._layers, residual.extrapolation_order),
            None if response is None else Corrections(plan.sampler, response, plan.begin),
        )

    def _give_up(self, reason: str) -> Memory | None:
        self._kinds, self.memories = {}, {}
        self._warn(f"{reason}; nothing more is skipped in this run")
        return None

    def drop(self, memory: Memory) -> None:
        """Forget a memory, and the model's state with the last one."""
        self.memories = {key: other for key, other in self.memories.items() if other is not memory}
        self._model = self._model if self.memories else None
