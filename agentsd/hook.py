"""A call of the U-Net from before to after: the one place that knows the order.

Before: place the call in its run, decide what it computes, plan its attention, skip its layers. After: keep
what it leaves for later calls, correct the cached ones before it, drop what is done with.
"""

from __future__ import annotations

import re
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from diffusers.utils import logging
from torch import Tensor
from torch.nn import Module
from torch.utils._pytree import tree_leaves, tree_map

from .foreign import foreign_inside, foreign_outside
from .hosts import RESIDUALS, latent_and_timestep, named_arguments, regroup
from .layers import PatchedLayers
from .memory import CachedFeatures, Corrections, Memory, Residuals
from .plan import COMPUTED, FULL, Call, CallKind, plan_run
from .presumed import ModelState, Trail, conditions_of
from .recipe import Phases, Recipe
from .run import Run, Runs
from .sampler import ImpulseResponse, Sampler, fingerprint, impulse_response, is_for_few_steps, schedulers_of
from .skip import SkippedLayers

FEWEST = 8
"""Steps of a run in which anything is skipped."""
_MOST_CONDITIONS = 32
"""Texts, or other conditions, that a step's calls are told apart by."""

logger = logging.get_logger(__name__)
_NUMBER = re.compile(r"\d+([.,]\d+)*")


class WarnOnce:
    """Logs each kind of warning once: the same words, whatever the numbers."""

    def __init__(self) -> None:
        self._warned: set[str] = set()

    def __call__(self, message: str) -> None:
        """Log it, unless one of its kind was logged before."""
        kind = _NUMBER.sub("#", message)
        if kind not in self._warned:
            self._warned.add(kind)
            logger.warning(f"agentsd: {message}")


def unsupported_reason(unet: Any, count: int, scheduler: Any, timesteps: Sequence[float] = ()) -> str:
    """Why nothing can be skipped in a run down a list of timesteps, in so many steps, or nothing."""
    if any(later > earlier + 0.5 for earlier, later in pairwise(timesteps)):  # KDPM2 rounds every second one
        return (
            "the timesteps go up (an inversion, where what is cached loses much more, or no run of one image)"
        )
    if is_for_few_steps(scheduler):
        return f"{type(scheduler).__name__} is for few steps, none of which can be spared"
    if count < FEWEST:
        return f"a run of {count} steps has none to spare (fewer than {FEWEST})"
    if other := foreign_inside(unet):
        return f"{other}, which may have to see each call"
    return ""


class Hook:
    """Hooks around the calls of a U-Net, which run outside of a compiled graph: tensors may be read here.

    Args:
        recipe: what the calls run.
        unet: the model.
        pipe: what was patched: its pipeline, the model itself, or what `torch.compile` made of it.
        layers: that are patched.
        warn: warns the user, once of each thing.

    Attributes:
        runs: the runs under way.
        caches: whether calls leave anything for later ones.
        skipped: the layers that cached calls skip, where there are cached calls.
        enabled: at False calls are the model's own, and nothing is kept.

    Raises:
        ValueError: the model's blocks are not Stable Diffusion's, and calls are to be cached.
    """

    def __init__(
        self, recipe: Recipe, unet: Any, pipe: Any, layers: PatchedLayers, warn: Callable[[str], None]
    ) -> None:
        self._patched = None if pipe is unet else weakref.ref(pipe)
        self._recipe, self._layers, self._warn = recipe, layers, warn
        self.caches = bool(recipe.steps or recipe.residual)
        if self.caches and not hasattr(unet, "up_blocks"):
            raise ValueError(
                f"{type(unet).__name__} is no U-Net, and no layer of it can be skipped: "
                'pass mode="agentsd", or a recipe without steps and residual'
            )
        self.skipped = None
        if recipe.steps is not None:
            self.skipped = SkippedLayers(unet, recipe.steps.layers)
            layers.find_skipped(self.skipped)
        self._timing = recipe.timing
        self.runs = Runs(self._timing)
        self.enabled = True
        self._owner: dict[str, int] = {}  # the thread of the call under way
        self._run: Run | None = None  # of the call under way
        self._call: Call | None = None
        self._memory: Memory | None = None  # that it uses
        self._recomputes = False  # a cached call is computed again
        self._waiting: list[Any] = []  # the states of calls inside which a hook calls the model
        self._response_of: tuple[bytes | None, ImpulseResponse | None] = (None, None)

    def __getstate__(self) -> dict[str, Any]:
        gone: dict[str, Any] = {
            "_patched": None,
            "_run": None,
            "_call": None,
            "_memory": None,
            "_recomputes": False,
            "_waiting": [],
        }
        return self.__dict__ | gone | {"_owner": {}}

    def __deepcopy__(self, memo: dict[int, Any]) -> Hook:
        copy = type(self).__new__(type(self))
        memo[id(self)] = copy
        copy.__dict__ |= deepcopy(self.__getstate__(), memo)
        if (other := memo.get(id(self.pipe))) is not None:  # the pipeline is being copied, too
            copy._patched = weakref.ref(other)
        return copy

    @property
    def pipe(self) -> Any:
        """What was patched: a pipeline or a wrapper of the model; None where the model was, or it is gone."""
        return self._patched() if self._patched is not None else None

    def switch(self, enabled: bool) -> None:
        """Let calls be the recipe's, or the model's own; either way the next begins a run."""
        self.enabled = enabled
        self.clean()

    def end_run(self, *args: Any, **kwargs: Any) -> None:
        """Let go of all that the thread's last run keeps; diffusers calls it when a pipeline is done."""
        self.runs.end()

    def clean(self) -> None:
        """Leave the U-Net as it was, and keep nothing of any thread's run."""
        self.runs.clear()
        self.undo_interrupted()

    def undo_interrupted(self) -> None:
        """Undo what a call was at when it was interrupted (Ctrl-C), under which torch runs no hook.

        Where a call of another thread is still under way, its own end does this.
        """
        if self._is_in_other_call():
            return
        if self.skipped is not None:
            self.skipped.end()
        self._layers.clean()
        self._run = self._call = self._memory = None
        self._recomputes = False
        self._waiting.clear()
        self._owner.clear()

    # ---- before a call

    @torch.compiler.disable
    def begin(self, unet: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Forward pre-hook: plan the call that starts."""
        if not self.enabled:
            return None
        if self._is_inside(unet):
            self._waiting.append((self.skipped and self.skipped.suspend(), self._layers.suspend()))
            return None
        if self._is_recompute():
            return None
        self._enter(unet)
        if torch.jit.is_tracing():
            return self._leave_alone(
                "the U-Net is being traced; the trace is the model's own, as no patch comes out of it again"
            )
        given = named_arguments(unet, args, kwargs)
        try:
            latent, timestep = latent_and_timestep(unet, given)
        except (KeyError, IndexError) as error:
            return self._leave_alone(
                f"a call of the {type(unet).__name__} has no argument {error}, so it is left as it "
                "is; name latents and timestep as diffusers' forward does"
            )
        pipe = self.pipe
        schedulers = [] if pipe is None or isinstance(pipe, Module) else schedulers_of(pipe)
        run, call = self._run, self._call = self.runs.place(latent, timestep, schedulers)
        self._warn_of_early_steps(run, call)
        memory = None
        if self.caches:
            call.inputs = given
            memory = self._memory = self._decide(unet, run, call)
        self._layers.begin(call, None if memory is None else memory.residuals)
        if memory is None or self.skipped is None or call.kind.computed:
            return None
        features = memory.features.extrapolate(call.sigma)[0]
        call.inputs = self.skipped.begin(features, call.inputs, again=memory.corrections is not None)
        given = tree_map(
            lambda value: value, call.inputs
        )  # the host takes adapters' residuals off their list
        return regroup(given, len(args))

    def _enter(self, unet: Module) -> None:
        """Refuse a call that can't be served beside another; else take note of it."""
        me = threading.get_ident()
        owner = self._owner.setdefault("thread", me)  # at once, for all threads
        if owner != me and self._is_in_other_call():
            raise RuntimeError(
                "agentsd: this U-Net is in a call of another thread; let threads take turns (a lock around "
                "the pipeline's call), or give each a U-Net of its own (copy.deepcopy)"
            )
        self._owner["thread"] = me
        if self._call is not None:  # the last call died before its end
            if self._run is not None:
                self._run.forget()
            self.undo_interrupted()
            self._owner["thread"] = me
        self._layers.enter(unet)

    def _leave_alone(self, message: str) -> None:
        """Let the call that begins be the model's own."""
        self._warn(message)
        self.clean()

    def _is_inside(self, unet: Module) -> bool:
        """Whether the call that begins is made by a hook or a layer inside the call under way."""
        frame = None if self._call is None else sys._getframe()
        while frame is not None:
            if frame.f_code.co_name == "forward" and frame.f_locals.get("self") is unet:
                return self._owner.get("thread") == threading.get_ident()
            frame = frame.f_back
        return False

    def _is_in_other_call(self) -> bool:
        """Whether the call under way is another thread's, which was not interrupted."""
        owner = self._owner.get("thread")
        frame = None if owner in (None, threading.get_ident()) else sys._current_frames().get(owner)
        while frame is not None:
            handle = getattr(frame.f_locals.get("self"), "__dict__", {}).get("_agentsd")
            if getattr(handle, "_hook", None) is self:
                return True
            frame = frame.f_back
        return False

    def _warn_of_early_steps(self, run: Run, call: Call) -> None:
        phases = self._timing
        if not isinstance(phases, Phases) or not 0 < phases.early_frac < 1:
            return
        if call.begins and run.is_late:
            self._warn(
                "this run has no early step (img2img of low strength has none), so what runs early "
                f"never runs in it; raise early_frac={phases.early_frac:g} (1.0: every step)"
            )
        if call.off_list:
            self._warn(
                f"timestep {call.timestep:g} is not one of the scheduler's, so early steps are "
                "guessed; pass an element of scheduler.timesteps to the U-Net, or apply agentsd to the "
                "pipeline"
            )

    def _decide(self, unet: Module, run: Run, call: Call) -> Memory | None:
        """Complete a call by its kind; returns what it may use of the calls before, and leaves its own in."""
        if call.begins or call.jumps or not run.is_open:
            self._open(unet, run, call)
        if self._recipe.residual is not None:
            call.kind = CallKind(attention=FULL)
        if call.off_list and run.kinds:
            self._warn(
                "a timestep is not one of the scheduler's list, so its call computes all layers; pass "
                "elements of scheduler.timesteps to the U-Net"
            )
        if call.off_list or call.index not in run.kinds:
            return None
        if torch.is_grad_enabled():
            run.memories.clear()
            self._warn(
                "gradients are on, under which no layer is skipped; call the U-Net under torch.no_grad() to "
                "skip some"
            )
            return None
        memory = self._memory_of(unet, run, call)
        if memory is not None:
            call.kind = memory.decide(run.kinds[call.index], call.stage)
            call.sigma = run.sampler.sigmas[call.index] if run.sampler.sigmas else None
            memory.index = call.index
        return memory

    def _open(self, unet: Any, run: Run, call: Call) -> None:
        """Plan a run from this call on; where timesteps were skipped, what is left of one."""
        run.forget()
        run.unmatched, run.begin = 0, call.index
        run.kinds, run.response, run.conditions = {}, None, {}
        run.sampler = Sampler(run.scheduler, run.timesteps)
        ahead = range(len(run.timesteps))[call.index :: run.stride]
        step_of_call = [run.sampler.step_of_call[index] for index in ahead]
        timesteps = [run.timesteps[index] for index in ahead]
        reason = unsupported_reason(unet, len(set(step_of_call)), run.scheduler, timesteps)
        if run.guesses:
            reason = (
                "the run's steps are not known (pass elements of scheduler.timesteps to the U-Net, or apply "
                "agentsd to the pipeline)"
            )
        residual = self._layers.residual_on(call.latent)
        kinds = plan_run(self._recipe.steps, step_of_call, residual)
        if reason:
            self._warn(f"{reason}; nothing is skipped in this run")
        elif any(kind not in (COMPUTED, CallKind(attention=FULL)) for kind in kinds):
            run.kinds = dict(zip(ahead, kinds, strict=True))
            if self._recipe.steps is not None and self._recipe.steps.correct:
                run.response = self._response(unet, run, call)
        if call.jumps:
            self._warn(
                "the U-Net is called on timesteps that skip some of the scheduler's list; what is left of "
                "the run is planned again there, and cached steps are not corrected"
            )
        run.is_open = True

    def _response(self, unet: Module, run: Run, call: Call) -> ImpulseResponse | None:
        """Of the run's sampler, where it has one and cached calls can be corrected; says what it means."""
        scheduler, name = run.scheduler, type(run.scheduler).__name__
        if run.stride > 1:  # its steps are not from one call to the next
            return None
        if scheduler is None:
            self._warn(
                "the timesteps are not those of a scheduler that is known, so cached steps are not "
                "corrected; apply agentsd to the pipeline that runs"
            )
            return None
        if watcher := foreign_outside(unet):
            self._warn(f"{watcher}, which would see calls twice; cached steps are not corrected")
            return None
        # The next run is likely to be on the same list. In the middle of one a sampler has a history.
        key = fingerprint(scheduler) if call.begins else None
        known, response = self._response_of
        if key is None or key != known:
            response = impulse_response(scheduler, run.begin)
        if key is not None and response is not None:
            self._response_of = key, response
        if response is None:
            self._warn(
                f"{name} is not linear in what the U-Net gives (clip_sample, thresholding), or can't be "
                "stepped alone here, so cached steps are not corrected"
            )
        elif response.noisy:
            self._warn(
                f"{name} adds noise in each step, under which caching changes images more; a deterministic "
                "sampler loses less"
            )
        return response

    def _memory_of(self, unet: Any, run: Run, call: Call) -> Memory | None:
        """What earlier calls left that a call may use; None where nothing more is skipped in the run."""
        oldest = call.index - run.stride  # what was not called in the step before is too old
        run.memories = {key: one for key, one in run.memories.items() if one.index >= oldest}
        run.model_state = run.model_state or ModelState(unet)
        conditions = conditions_of(call, run.model_state)
        before, run.conditions = run.conditions, conditions
        key = tuple(conditions.items())
        memory = run.memories.get(key)
        if memory is None and self.skipped is not None and not self.skipped.are_current:
            self._give_up(run, "the U-Net has other blocks than when agentsd was applied (apply it again)")
            return None
        if memory is None:
            changed = [name for name in before | conditions if before.get(name) != conditions.get(name)]
            broken = f"{' and '.join(changed)} changed"
        elif memory.index == call.index:
            self._give_up(run, "the U-Net is called more than once in a step on the same text")
            return None
        elif not (broken := memory.trail.broken(call, run.kinds[call.index].computed)):
            run.unmatched = 0
            return memory
        others = [one for one in run.memories.values() if one.index == call.index]
        run.unmatched += not others  # the step's first call
        if run.unmatched == 3 or len(others) == _MOST_CONDITIONS:
            self._give_up(run, f"in {len(others) or 3} calls in succession {broken}")
            return None
        if call.index > run.begin:
            self._warn(f"{broken}, so a call computes all layers")
        deterministic = run.response is not None and not run.response.noisy
        limits = run.sampler.new_noise(deterministic)
        trail = Trail(limits, run.model_state.samples) if memory is None else memory.trail
        memory = run.memories[key] = self._new_memory(run, call, trail)
        return memory

    def _new_memory(self, run: Run, call: Call, trail: Trail) -> Memory:
        steps, residual = self._recipe.steps, self._recipe.residual
        order = 0 if steps is None else steps.extrapolation_order
        features = CachedFeatures(order, interpolates=run.response is not None)
        given = call.inputs.items()  # but the call's own, which are large and told by no address
        held = [one for name, one in given if name not in RESIDUALS and one is not call.latent]
        memory = Memory(tree_leaves(held), trail, features)
        if call.index > run.begin:  # no warm-up is planned there
            memory.warmup = order + 1
        if run.response is not None:
            memory.corrections = Corrections(run.sampler, run.response, run.begin)
        if residual is not None:
            memory.residuals = Residuals(self._layers.processors, residual.extrapolation_order)
        return memory

    def _give_up(self, run: Run, reason: str) -> None:
        run.kinds, run.memories = {}, {}
        self._warn(f"{reason}; nothing more is skipped in this run")

    # ---- after it

    @torch.compiler.disable
    def end(self, unet: Module, args: tuple[Any, ...], output: Any) -> Any:
        """Forward hook: what the caller gets for what the U-Net gave, which is None if it raised."""
        if self._owner.get("thread") != threading.get_ident():
            return None  # it was refused, or left alone
        if self._waiting:
            state, layers = self._waiting.pop()
            self._layers.resume(layers)
            if self.skipped is not None:
                self.skipped.resume(*state)
            return None
        if self._is_recompute():
            return None
        run = self._run
        try:
            return self._leave(unet, len(args), run, self._call, self._memory, output)
        except BaseException:
            self.undo_interrupted()
            if run is not None:
                run.forget()
            raise
        finally:
            self._run = self._call = self._memory = None
            self._owner.clear()
            if not self.enabled:  # any more: another thread has switched it off
                self.clean()

    def _leave(
        self,
        unet: Module,
        positional: int,
        run: Run | None,
        call: Call | None,
        memory: Memory | None,
        output: Any,
    ) -> Any:
        """Keep what a call leaves for later ones, and correct those before it; returns what it gives."""
        computed = None if self.skipped is None else self.skipped.end()
        if call is None or run is None:
            self._layers.leave(output)
            return None
        attention = self._layers.end(call, None if memory is None else memory.residuals, output)
        if output is None:
            run.forget()
            return None
        run.history.kinds.append(CallKind(call.kind.computed, attention))
        if memory is None:
            return None
        if call.kind.computed and computed is not None:
            memory.features.keep(call.sigma, [computed.clone()])
        if memory.corrections is not None and call.kind.computed:
            output = self._correct(unet, positional, run, call, memory, memory.corrections, output)
        elif memory.corrections is not None:
            output = self._make_up(call, memory, memory.corrections, output)
        memory.trail.note(call, sample_of(output))
        if call.index + run.stride >= len(run.timesteps):  # the last: nothing will use it
            run.memories = {key: other for key, other in run.memories.items() if other is not memory}
            run.model_state = run.model_state if run.memories else None  # nor hold weights
        return output

    def _make_up(self, call: Call, memory: Memory, corrections: Corrections, output: Any) -> Any:
        """What a cached call gives: without what is wrong in the sampler's history. It will be corrected."""
        call.output = sample_of(output).clone()
        call.given = corrections.make_up(call.index, call.output)
        for one in memory.cached:
            one.inputs = {}  # the last alone is computed again
        memory.cached.append(call)
        return with_sample(output, call.given)

    def _correct(
        self,
        unet: Module,
        positional: int,
        run: Run,
        call: Call,
        memory: Memory,
        corrections: Corrections,
        output: Any,
    ) -> Any:
        """What a computed call gives, so that the sampler gets to where it would have been.

        Now that features are known on both sides of the cached calls before it, the last is computed again on
        those between, which tells what they got wrong.
        """
        sample = sample_of(output)
        cached, memory.cached = memory.cached, []
        if cached and self.skipped is not None and self.skipped.feature_hook.compiled:
            sample = sample.clone()  # as a CUDA graph, whose next call overwrites it
        if cached:
            last = sample_of(self._recompute(unet, positional, cached[-1], memory))
            corrections.note(cached, memory.features, last)
        run.history.corrected += len(cached)
        corrected = corrections.correct(call.index, sample)
        return output if corrected is sample and not cached else with_sample(output, corrected)

    def _recompute(self, unet: Module, positional: int, call: Call, memory: Memory) -> Any:
        """Compute a cached call again, on the features that are known now, before the call after it ends."""
        assert self.skipped is not None
        args, kwargs = regroup(call.inputs, positional)  # as the caller does, for a compiled graph's sake
        residuals = memory.residuals
        if residuals is not None and residuals.stage != call.stage:  # of another phase's operator by now
            call = replace(call, kind=CallKind(computed=False, attention=FULL))
        output, self._recomputes = None, True
        try:
            self.skipped.put(memory.features.interpolate(call.sigma)[0])
            self._layers.begin(call, residuals, interpolate=True)
            output = self._called(unet)(*args, **kwargs)
        finally:
            self._recomputes = False
            self.skipped.end()
            self._layers.end(call, residuals, output)
        return output

    def _is_recompute(self) -> bool:
        """Whether the call is a cached one that is computed again."""
        return self._recomputes and self._owner.get("thread") == threading.get_ident()

    def _called(self, unet: Module) -> Any:
        """What the caller calls: the U-Net, or what `torch.compile` made of it."""
        own = self.pipe if isinstance(self.pipe, Module) else getattr(self.pipe, "unet", None)
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
