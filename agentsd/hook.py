"""One U-Net call from start to end. This is the only file that knows the order of things.

Before the call: find its place in the run, decide what it computes, plan its attention, skip layers.
After the call: store what later calls need, correct the cached calls before it, drop what is no longer used.
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
    """What the start of a call leaves for its end."""

    run: Run
    call: Call
    memory: Memory | None = None


class Hook:
    """The hooks before and after each U-Net call. They run outside compiled graphs, so they may read tensors.

    Args:
        recipe: what the calls run.
        unet: the model.
        pipe: what was patched: a pipeline, the model itself, or what `torch.compile` made of it.
        layers: the patched attention layers.

    Attributes:
        runs: the runs in progress.
        caches: whether calls leave anything for later calls.
        skipped: the layers that cached calls skip.
        enabled: if False, calls are left alone and nothing is kept.

    Raises:
        ValueError: calls are to be cached, but the model's blocks are not Stable Diffusion's.
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
        self._recomputes = False  # whether a cached call is being computed again
        self._responses: Responses = {}

    def clean(self, unet: Any) -> None:
        """Leave the U-Net as it was, and forget the runs of all threads."""
        self.runs.clear()
        self.undo_interrupted(unet)

    def undo_interrupted(self, unet: Any) -> None:
        """Undo what an interrupted call left behind. torch runs no hook on Ctrl-C.

        If another thread's call is still in progress, that call's own end does this.
        """
        if self._turn.is_anothers(unet):
            return
        self.skipped.end()
        self._layers.clean()
        self._recomputes = False
        self._turn.end()

    @torch.compiler.disable
    def begin(self, unet: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Forward pre-hook: plan the call."""
        if not self.enabled:
            return None
        whose = self._turn.take(unet)
        if whose == INNER:
            self._turn.waiting.append((self.skipped.suspend(), self._layers.suspend()))
        if whose != OWN or self._recomputes:
            return None
        if self._turn.call is not None:  # the last call was interrupted
            self._turn.call.run.cache = None
            self.undo_interrupted(unet)
            self._turn.take(unet)
        self._layers.enter(unet)
        try:
            given, latent, timestep = read_call(unet, args, kwargs)
        except ValueError as error:
            self._warn(str(error))
            return self.clean(unet)  # the call is left alone
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
        if memory is None or call.kind.full:
            return None
        features = memory.features.extrapolate(call.sigma)[0]
        call.inputs = self.skipped.begin(features, call.inputs, again=memory.corrections is not None)
        # With copies of the lists: the host pops adapter residuals off them.
        return regroup(tree_map(lambda value: value, call.inputs), call.positional)

    def _plan(self, unet: Module, run: Run, call: Call) -> RunCache:
        """Plan a run from this call on; after skipped timesteps, plan the rest of it."""
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
        """Forward hook: return what the caller gets. `output` is None if the U-Net raised."""
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
            if not self.enabled:  # another thread has switched it off meanwhile
                self.clean(unet)

    def _leave(self, unet: Module, under_way: UnderWay | None, output: Any) -> Any:
        """Store what later calls need and correct earlier ones; return the call's output."""
        computed = self.skipped.end()
        if under_way is None:
            self._layers.leave(output)
            return None
        run, call, memory = under_way
        attention = self._layers.end(call, _residuals(memory), output)
        if output is None:
            run.cache = None
            return None
        run.history.kinds.append(CallKind(call.kind.full, attention))
        if memory is None:
            return None
        if computed is not None:
            memory.features.keep(call.sigma, [computed.clone()])
        if call.kind.full:
            output = self._correct(unet, run, call, memory, output)
        else:
            output = self._make_up(call, memory, output)
        memory.before = call.latent.detach().clone(), sample_of(output).detach().clone()
        if run.cache is not None and call.index + run.stride >= len(run.timesteps):  # the last call
            run.cache.drop(memory)
        return output

    def _make_up(self, call: Call, memory: Memory, output: Any) -> Any:
        """Return a cached call's output, minus known errors in the sampler's history; corrected later."""
        if memory.corrections is None:
            return output
        call.output = sample_of(output).clone()
        call.given = memory.corrections.make_up(call.index, call.output)
        for one in memory.cached:
            one.inputs = {}  # only the last is computed again
        memory.cached.append(call)
        return with_sample(output, call.given)

    def _correct(self, unet: Module, run: Run, call: Call, memory: Memory, output: Any) -> Any:
        """Return the output of a full call that takes the sampler to where it would have been.

        Features are now known on both sides of the cached calls before this one. So the last of these is
        computed again on features in between, which shows the error of each.
        """
        corrections, cached, memory.cached = memory.corrections, memory.cached, []
        if corrections is None:
            return output
        sample = sample_of(output)
        if cached:
            if self.skipped.feature_hook.compiled:
                sample = sample.clone()  # a CUDA graph's next call overwrites it
            last = sample_of(self._recompute(unet, cached[-1], memory))
            corrections.note(cached, memory.features, last)
            run.history.corrected += len(cached)
        corrected = corrections.correct(call.index, sample)
        return output if corrected is sample and not cached else with_sample(output, corrected)

    def _recompute(self, unet: Module, call: Call, memory: Memory) -> Any:
        """Compute a cached call again on the features that are known now."""
        args, kwargs = regroup(call.inputs, call.positional)  # as the caller did: it is the same graph
        residuals = memory.residuals
        if residuals is not None and residuals.stage != call.stage:  # those of its own stage are gone
            call = replace(call, kind=CallKind(full=False, attention=FULL))
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
    """Return what the caller calls: the U-Net, or what `torch.compile` made of it."""
    own = pipe if isinstance(pipe, Module) else getattr(pipe, "unet", None)
    return own if getattr(own, "_orig_mod", None) is unet else unet


def sample_of(output: Any) -> Tensor:
    """Return the prediction in a U-Net's output."""
    sample: Tensor = output[0] if isinstance(output, tuple) else output.sample
    return sample


def with_sample(output: Any, sample: Tensor) -> Any:
    """Return the output with another prediction."""
    if isinstance(output, tuple):
        return (sample, *output[1:])
    return type(output)(sample=sample)
