"""A call of the U-Net from before to after: the one place that knows the order.

Before: place the call in its run, decide what it computes, plan its attention, skip its layers. After: keep
what it leaves for later calls, correct the cached ones before it, drop what is done with.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from diffusers.utils import logging
from torch import Tensor
from torch.nn import Module
from torch.utils._pytree import tree_map

from .hosts import read_call, regroup
from .layers import PatchedLayers
from .memory import Memory, Residuals, RunCache, RunPlan
from .plan import FULL, Call, CallKind
from .planning import Responses, plan_caching
from .recipe import Recipe
from .run import Run, Runs
from .skip import SkippedLayers
from .turn import INNER, OWN, Turn
from .warn import WarnOnce

logger = logging.get_logger(__name__)


class UnderWay(NamedTuple):
    """What a call's beginning leaves to its end."""

    run: Run
    call: Call
    memory: Memory | None = None


class Hook:
    """Hooks around the calls of a U-Net, which run outside of a compiled graph: tensors may be read here.

    Args:
        recipe: what the calls run.
        unet: the model.
        pipe: what was patched: its pipeline, the model itself, or what `torch.compile` made of it.
        layers: that are patched.

    Attributes:
        runs: the runs under way.
        caches: whether calls leave anything for later ones.
        skipped: the layers that cached calls skip.
        enabled: at False calls are the model's own, and nothing is kept.

    Raises:
        ValueError: the model's blocks are not Stable Diffusion's, and calls are to be cached.
    """

    def __init__(self, recipe: Recipe, unet: Any, pipe: Any, layers: PatchedLayers) -> None:
        self._recipe, self._layers, self._warn = recipe, layers, WarnOnce(logger)
        self.caches = bool(recipe.steps or recipe.residual)
        if self.caches and not hasattr(unet, "up_blocks"):
            raise ValueError(
                f"{type(unet).__name__} is no U-Net, and no layer of it can be skipped: "
                'pass mode="agentsd", or a recipe without steps and residual'
            )
        self.skipped = SkippedLayers(unet, None if recipe.steps is None else recipe.steps.layers)
        layers.find_skipped(self.skipped)
        self.runs = Runs(recipe.timing, None if pipe is unet else pipe)
        self.enabled = True
        self._turn = Turn()
        self._recomputes = False  # a cached call is being computed again
        self._responses: Responses = {}

    def clean(self, unet: Any) -> None:
        """Leave the U-Net as it was, and keep nothing of any thread's run."""
        self.runs.clear()
        self.undo_interrupted(unet)

    def undo_interrupted(self, unet: Any) -> None:
        """Undo what a call was at when it was interrupted (Ctrl-C), under which torch runs no hook.

        Where a call of another thread is still under way, its own end does this.
        """
        if self._turn.is_anothers(unet):
            return
        self.skipped.end()
        self._layers.clean()
        self._recomputes = False
        self._turn.end()

    @torch.compiler.disable
    def begin(self, unet: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Forward pre-hook: plan the call that starts."""
        if not self.enabled:
            return None
        whose = self._turn.take(unet)
        if whose == INNER:
            self._turn.waiting.append((self.skipped.suspend(), self._layers.suspend()))
        if whose != OWN or self._recomputes:
            return None
        if self._turn.call is not None:  # the last call died before its end
            self._turn.call.run.cache = None
            self.undo_interrupted(unet)
            self._turn.take(unet)
        self._layers.enter(unet)
        try:
            given, latent, timestep = read_call(unet, args, kwargs)
        except ValueError as error:
            self._warn(str(error))
            return self.clean(unet)  # the call is the model's own
        run, call = self.runs.place(latent, timestep)
        self._turn.call = UnderWay(run, call)
        if call.begins or call.off_list:
            self._warn(run.remark(call))
        memory = None
        if self.caches:
            call.inputs, call.positional = given, len(args)
            if (cache := run.cache) is None or call.begins or call.jumps:
                cache = run.cache = self._plan(unet, run, call)
            memory = cache.memory_of(unet, call)
            self._turn.call = UnderWay(run, call, memory)
        self._layers.begin(call, _residuals(memory))
        if memory is None or call.kind.computed:
            return None
        features = memory.features.extrapolate(call.sigma)[0]
        call.inputs = self.skipped.begin(features, call.inputs, again=memory.corrections is not None)
        # In lists of its own: the host takes adapters' residuals off theirs.
        return regroup(tree_map(lambda value: value, call.inputs), call.positional)

    def _plan(self, unet: Module, run: Run, call: Call) -> RunCache:
        """Plan a run from this call on; where timesteps were skipped, what is left of one."""
        residual = self._layers.residual_on(call.latent)
        plan = plan_caching(self._recipe, unet, run, call, residual, self._responses)
        if isinstance(plan, str):
            self._warn(f"{plan}; nothing is skipped in this run")
            plan = RunPlan()
        self._warn(plan.remark)
        if call.jumps:
            self._warn(
                "the U-Net is called on timesteps that skip some of the scheduler's list; what is left of "
                "the run is planned again there, and cached steps are not corrected"
            )
        return RunCache(plan, self._recipe, self._layers.processors, self.skipped, self._warn)

    @torch.compiler.disable
    def end(self, unet: Module, args: tuple[Any, ...], output: Any) -> Any:
        """Forward hook: what the caller gets for what the U-Net gave, which is None if it raised."""
        whose = self._turn.whose()
        if whose == INNER:
            state, layers = self._turn.waiting.pop()
            self._layers.resume(layers)
            self.skipped.resume(*state)
        if whose != OWN or self._recomputes:
            return None
        under_way = self._turn.call
        try:
            return self._leave(unet, under_way, output)
        except BaseException:
            self.undo_interrupted(unet)
            if under_way is not None:
                under_way.run.cache = None
            raise
        finally:
            self._turn.end()
            if not self.enabled:  # any more: another thread has switched it off
                self.clean(unet)

    def _leave(self, unet: Module, under_way: UnderWay | None, output: Any) -> Any:
        """Keep what a call leaves for later ones, and correct those before it; returns what it gives."""
        computed = self.skipped.end()
        if under_way is None:
            self._layers.leave(output)
            return None
        run, call, memory = under_way
        attention = self._layers.end(call, _residuals(memory), output)
        if output is None:
            run.cache = None
            return None
        run.history.kinds.append(CallKind(call.kind.computed, attention))
        if memory is None:
            return None
        if computed is not None:
            memory.features.keep(call.sigma, [computed.clone()])
        if call.kind.computed:
            output = self._correct(unet, run, call, memory, output)
        else:
            output = self._make_up(call, memory, output)
        memory.before = call.latent.detach().clone(), sample_of(output).detach().clone()
        if run.cache is not None and call.index + run.stride >= len(run.timesteps):  # nothing will use it
            run.cache.drop(memory)
        return output

    def _make_up(self, call: Call, memory: Memory, output: Any) -> Any:
        """What a cached call gives: without what is wrong in the sampler's history. It will be corrected."""
        if memory.corrections is None:
            return output
        call.output = sample_of(output).clone()
        call.given = memory.corrections.make_up(call.index, call.output)
        for one in memory.cached:
            one.inputs = {}  # the last alone is computed again
        memory.cached.append(call)
        return with_sample(output, call.given)

    def _correct(self, unet: Module, run: Run, call: Call, memory: Memory, output: Any) -> Any:
        """What a computed call gives, so that the sampler gets to where it would have been.

        Now that features are known on both sides of the cached calls before it, the last is computed again on
        those between, which tells what they got wrong.
        """
        corrections, cached, memory.cached = memory.corrections, memory.cached, []
        if corrections is None:
            return output
        sample = sample_of(output)
        if cached:
            if self.skipped.feature_hook.compiled:
                sample = sample.clone()  # as a CUDA graph, whose next call overwrites it
            last = sample_of(self._recompute(unet, cached[-1], memory))
            corrections.note(cached, memory.features, last)
            run.history.corrected += len(cached)
        corrected = corrections.correct(call.index, sample)
        return output if corrected is sample and not cached else with_sample(output, corrected)

    def _recompute(self, unet: Module, call: Call, memory: Memory) -> Any:
        """Compute a cached call again, on the features that are known now, before the call after it ends."""
        args, kwargs = regroup(call.inputs, call.positional)  # as the caller did, for a compiled graph's sake
        residuals = memory.residuals
        if residuals is not None and residuals.stage != call.stage:  # of another phase's operator by now
            call = replace(call, kind=CallKind(computed=False, attention=FULL))
        output, self._recomputes = None, True
        try:
            self.skipped.put(memory.features.interpolate(call.sigma)[0])
            self._layers.begin(call, residuals, interpolate=True)
            output = _called(unet, self.runs.pipe)(*args, **kwargs)
        finally:
            self._recomputes = False
            self.skipped.end()
            self._layers.end(call, residuals, output)
        return output


def _residuals(memory: Memory | None) -> Residuals | None:
    return None if memory is None else memory.residuals


def _called(unet: Module, pipe: Any) -> Any:
    """What the caller calls: the U-Net, or what `torch.compile` made of it."""
    own = pipe if isinstance(pipe, Module) else getattr(pipe, "unet", None)
    return own if getattr(own, "_orig_mod", None) is unet else unet


def sample_of(output: Any) -> Tensor:
    """The prediction in what a U-Net returns."""
    sample: Tensor = output[0] if isinstance(output, tuple) else output.sample
    return sample


def with_sample(output: Any, sample: Tensor) -> Any:
    """The same with another prediction."""
    if isinstance(output, tuple):
        return (sample, *output[1:])
    return type(output)(sample=sample)
