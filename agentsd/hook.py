"""A call of the U-Net from before to after: the one place that knows the order."""

from __future__ import annotations

import re
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import torch
from diffusers.utils import logging
from torch import Tensor
from torch.nn import Module

from .attention.processor import LayerState
from .foreign import Changes, foreign_inside, foreign_outside
from .hosts import latent_and_timestep, named_arguments, regroup
from .layers import PatchedLayers, PendingBackward
from .memory import CachedFeatures, CacheEntry, Corrections, Residuals, StepContext
from .plan import COMPUTED, FULL, KEEP, OPERATOR, SHARE, ResidualSharing, StepCache, StepKind, plan_run
from .recipe import Phases, Recipe
from .run import History, Runs, RunState, Step, list_of, own_list
from .sampler import ImpulseResponse, Sampler, holds, impulse_response, is_for_few_steps, schedulers_of
from .skip import SkippedLayers, copy_inputs

FEWEST = 8
"""Steps of a run in which anything is skipped."""


def unsupported_reason(unet: Any, count: int, scheduler: Any) -> str:
    """Why nothing can be skipped in a run of so many steps, or nothing."""
    if is_for_few_steps(scheduler):
        return f"{type(scheduler).__name__} is for few steps, none of which can be spared"
    if count < FEWEST:
        return f"a run of {count} steps has none to spare (fewer than {FEWEST})"
    if other := foreign_inside(unet):
        return f"{other}, which may have to see each call"
    return ""


_SKIPS_TIMESTEPS = (
    "agentsd: the U-Net is called on timesteps that skip some of the scheduler's list; what is left of the "
    "run is planned again there, and cached steps are not corrected"
)
_OFF_LIST = (
    "agentsd: a timestep is not one of the scheduler's list, so its call computes all layers; pass elements "
    "of scheduler.timesteps to the U-Net"
)
_UNKNOWN = (
    "agentsd: the timesteps are not those of a scheduler that is known, so cached steps are not corrected; "
    "apply agentsd to the pipeline that runs"
)

Recompute: TypeAlias = Callable[[StepContext], Any]
"""Computes a cached step again -> the output."""


class Caching:
    """Skips in a U-Net's calls what a recipe says; what a run keeps is in its `RunState`.

    Args:
        unet: the model.
        steps, residual: the recipe's settings.
        layers: whose residuals are shared.
        warn: warns the user, once of each thing.

    Attributes:
        skipped: the layers that its cached steps skip, where it has any.

    Raises:
        ValueError: the model's blocks are not Stable Diffusion's.
    """

    def __init__(
        self,
        unet: Any,
        steps: StepCache | None,
        residual: ResidualSharing | None,
        layers: Sequence[LayerState],
        warn: Callable[[str], None],
    ) -> None:
        if not hasattr(unet, "up_blocks"):
            raise ValueError(
                f"{type(unet).__name__} is no U-Net, and no layer of it can be skipped: "
                'pass mode="agentsd", or a recipe without steps and residual'
            )
        self._steps, self._residual, self._layers = steps, residual, layers
        self.skipped = None if steps is None else SkippedLayers(unet, steps.layers)
        self._warn = warn

    def begin(self, unet: Module, run: RunState, context: StepContext, step: Step) -> None:
        """Decide what a call computes, and complete its context.

        Args:
            unet: the model.
            run: of the call.
            context: of the call.
            step: where in the run it is.
        """
        self.stop()  # the call before may have died before its end
        if step.first_call or step.skips_timesteps or not run.is_open:
            self._open(unet, run)
            if step.skips_timesteps:
                self._warn(_SKIPS_TIMESTEPS)
        context.kind = COMPUTED if self._residual is None else replace(COMPUTED, attention=FULL)
        if step.off_list and run.kinds:
            self._warn(_OFF_LIST)
        reader, step_index = run.reader, run.reader.step_index
        if step_index not in run.kinds or step.off_list or not self._may_keep(run):
            return
        entry = self._entry(run, context)
        if entry is None:
            return
        context.kind = self._possible(run.kinds[step_index], entry, context)
        context.entry = entry
        context.sigma = run.sampler.sigmas[step_index] if run.sampler.sigmas else None
        context.is_last = step_index + reader.stride >= len(reader.timesteps)
        entry.step_index = step_index

    def skip(self, context: StepContext) -> dict[str, Any]:
        """Skip the layers that a call that `begin` decided on does without; returns its inputs."""
        if context.kind.computed or self.skipped is None or context.entry is None:
            return context.inputs
        self.skipped.begin(context.entry.features.extrapolate(context.sigma)[0])
        context.inputs = self.skipped.without_residuals(context.inputs)
        if context.entry.corrections is not None:
            context.inputs = copy_inputs(context.inputs)
        return context.inputs

    def stop(self) -> Tensor | None:
        """Skip nothing from here on; returns what a computed step had where the last layers begin."""
        return None if self.skipped is None else self.skipped.end()

    def end(self, run: RunState, context: StepContext | None, output: Any, recompute: Recompute) -> Any:
        """What the caller gets for what the U-Net gave; None if it raised."""
        computed = self.stop()
        if output is None:
            run.forget()
        if context is None or output is None or context.entry is None:
            return output
        entry = context.entry
        if computed is not None and context.kind.computed:
            entry.features.keep(context.sigma, [computed.clone()])
        if entry.corrections is not None:
            output = self._correct(run, context, entry, entry.corrections, output, recompute)
        if context.is_last:
            run.entries = {key: other for key, other in run.entries.items() if other is not entry}
            run.changes = run.changes if run.entries else None
        return output

    def _correct(
        self,
        run: RunState,
        context: StepContext,
        entry: CacheEntry,
        corrections: Corrections,
        output: Any,
        recompute: Recompute,
    ) -> Any:
        """What a call gives, so that the sampler gets to where it would have been."""
        assert self.skipped is not None
        sample = sample_of(output)
        if not context.kind.computed:
            given = corrections.make_up(context.index, sample).clone()
            # without its entry, which holds it: both are let go as soon as the entry is
            entry.cached.append(replace(context, entry=None, given=given))
            return with_sample(output, given)
        cached, entry.cached = entry.cached, []
        if cached and self.skipped.feature_hook.compiled:  # as a CUDA graph, whose next call overwrites it
            sample = sample.clone()
        try:
            for one in cached:
                assert one.given is not None
                corrections.note(one.index, one.given, self._recompute(one, entry, recompute))
        except BaseException:
            run.forget()
            raise
        run.history.corrected += len(cached)
        corrected = corrections.correct(context.index, sample)
        return output if corrected is sample and not cached else with_sample(output, corrected)

    def _recompute(self, cached: StepContext, entry: CacheEntry, recompute: Recompute) -> Tensor:
        """(B, ...) what a cached step would have given on the features that are known now."""
        assert self.skipped is not None
        context = replace(cached, entry=entry)
        self.skipped.begin(entry.features.interpolate(cached.sigma)[0])
        try:
            return sample_of(recompute(context))
        finally:
            self.skipped.end()

    def _open(self, unet: Any, run: RunState) -> None:
        """Plan a run from its first call on, or what is left of one."""
        reader, scheduler = run.reader, run.scheduler
        run.is_open, run.unmatched = True, 0
        run.entries.clear()
        run.kinds, run.response, run.changes, run.begin = {}, None, None, reader.step_index
        run.sampler = sampler = Sampler(scheduler, reader.timesteps)
        ahead = range(len(reader.timesteps))[reader.step_index :: reader.stride]
        step_of_call = [sampler.step_of_call[index] for index in ahead]
        reason = unsupported_reason(unet, len(set(step_of_call)), scheduler)
        if reader.guesses:
            reason = (
                "the run's steps are not known (pass elements of scheduler.timesteps to the U-Net, or apply "
                "agentsd to the pipeline)"
            )
        if reason:
            self._warn(f"agentsd: {reason}; nothing is skipped in this run")
            return
        kinds = plan_run(self._steps, step_of_call, self._residual)
        if all(kind.computed and kind.attention in (OPERATOR, FULL) for kind in kinds):
            return
        run.kinds = dict(zip(ahead, kinds, strict=True))
        run.changes = Changes(unet)
        if self._steps is not None and self._steps.correct:
            if scheduler is None:
                self._warn(_UNKNOWN)
            elif watcher := foreign_outside(unet):
                self._warn(f"agentsd: {watcher}, which would see calls twice; cached steps are not corrected")
            elif reader.stride == 1:  # else its steps are not from one call to the next
                run.response = self._response(scheduler, run.begin)

    def _response(self, scheduler: Any, begin: int) -> ImpulseResponse | None:
        """The sampler's, where it has one; says what it means for cached steps."""
        response, name = impulse_response(scheduler, begin), type(scheduler).__name__
        if response is None:
            self._warn(
                f"agentsd: {name} is not linear in what the U-Net gives (clip_sample, thresholding), or "
                "can't be stepped alone here, so cached steps are not corrected"
            )
        elif response.noisy:
            self._warn(
                f"agentsd: {name} adds noise in each step, under which caching changes images "
                "more; a deterministic sampler loses less"
            )
        return response

    def _may_keep(self, run: RunState) -> bool:
        if not torch.is_grad_enabled():
            return True
        run.entries.clear()
        self._warn(
            "agentsd: gradients are on, under which no layer is skipped; call the U-Net under "
            "torch.no_grad() to skip some"
        )
        return False

    def _entry(self, run: RunState, context: StepContext) -> CacheEntry | None:
        """The cache entry of the calls on this text and shape; None where calls can't be told apart."""
        step_index = run.reader.step_index
        sample, text = context.inputs["sample"], context.inputs.get("encoder_hidden_states")
        oldest = step_index - run.reader.stride  # what was not called in the step before is too old
        run.entries = {key: entry for key, entry in run.entries.items() if entry.step_index >= oldest}
        key = (
            (tuple(sample.shape), sample.dtype, sample.device, _autocast(sample.device.type)),
            (_identity(text), _plain(context.inputs.get("cross_attention_kwargs"))),
            run.changes and run.changes.read(),
        )
        entry = run.entries.get(key)
        if entry is not None and entry.step_index == step_index:
            self._give_up(run, "the U-Net is called more than once in a step on the same text")
            return None
        if entry is not None:
            run.unmatched = 0
            return entry
        if all(entry.step_index < step_index for entry in run.entries.values()):  # the step's first call
            run.unmatched += 1
        if run.unmatched == 3:
            self._give_up(
                run, "the U-Net gets another text or a new tensor of it, or other scales, in each call"
            )
            return None
        order = 0 if self._steps is None else self._steps.extrapolation_order
        count = 1 + max(order, run.response is not None)
        run.entries[key] = entry = CacheEntry(text, CachedFeatures(order, count))
        if run.response is not None and self.skipped is not None:
            entry.corrections = Corrections(run.sampler, run.response, run.begin)
        if self._residual is not None:
            entry.residuals = Residuals(self._layers, self._residual.extrapolation_order)
        return entry

    def _give_up(self, run: RunState, reason: str) -> None:
        run.kinds = {}
        run.entries.clear()
        self._warn(f"agentsd: {reason}; nothing more is skipped in this run")

    def _possible(self, kind: StepKind, entry: CacheEntry, context: StepContext) -> StepKind:
        """What is planned, or more where not enough is known yet."""
        computed, attention = kind.computed or not entry.features, kind.attention
        if entry.residuals is not None and attention == SHARE and not entry.residuals.fit(context.stage):
            attention = KEEP if computed else FULL  # there are none yet, or another operator's
        return StepKind(computed, attention)


def _identity(text: Any) -> Any:
    """What says that a tensor is the same one, unchanged, without a look at its numbers."""
    if not isinstance(text, Tensor):
        return id(text)
    version = 0 if text.is_inference() else text._version
    return text.data_ptr(), text.shape, text.stride(), version


def _autocast(device: str) -> Any:
    """The dtype that autocast computes in now; None without."""
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def _plain(settings: Any) -> Any:
    """The settings of a call that are numbers or words, a LoRA's scale among them."""
    named = settings.items() if isinstance(settings, Mapping) else ()
    return tuple((name, value) for name, value in named if isinstance(value, int | float | str))


def sample_of(output: Any) -> Tensor:
    """The prediction in what a U-Net returns."""
    sample: Tensor = output[0] if isinstance(output, tuple) else output.sample
    return sample


def with_sample(output: Any, sample: Tensor) -> Any:
    """The same with another prediction."""
    if isinstance(output, tuple):
        return (sample, *output[1:])
    return type(output)(sample=sample)


logger = logging.get_logger(__name__)
_NUMBER = re.compile(r"\d+([.,]\d+)*")
_TRACED = (
    "agentsd: the U-Net is being traced; the trace is the model's own, as no patch comes out of it again"
)


class WarnOnce:
    """Logs each kind of warning once: the same words, whatever the numbers."""

    def __init__(self) -> None:
        self._warned: set[str] = set()

    def __call__(self, message: str) -> None:
        """Log it, unless one of its kind was logged before."""
        kind = _NUMBER.sub("#", message)
        if kind not in self._warned:
            self._warned.add(kind)
            logger.warning(message)


class DenoiserHook:
    """Hooks around the calls of a U-Net, which run outside of a compiled graph: tensors may be read here.

    Args:
        recipe: what the calls run.
        unet: the model.
        pipe: what was patched: its pipeline, the model itself, or what `torch.compile` made of it.
        layers: that are patched.
        warn: warns the user, once of each thing.

    Attributes:
        cache: what is cached; None where nothing is.
        runs: the runs under way.
        enabled: at False calls are the model's own, and nothing is kept.
    """

    def __init__(
        self, recipe: Recipe, unet: Module, pipe: Any, layers: PatchedLayers, warn: Callable[[str], None]
    ) -> None:
        self._patched = None if pipe is unet else weakref.ref(pipe)
        self._layers, self._warn = layers, warn
        self.cache = None
        if recipe.steps or recipe.residual:
            self.cache = Caching(unet, recipe.steps, recipe.residual, layers.states, warn)
            if self.cache.skipped is not None:
                layers.find_skipped(self.cache.skipped)
        self.runs = Runs(recipe.timing)
        self.enabled = True
        self._timing = recipe.timing
        self._owner: dict[str, int] = {}  # the thread of the call under way
        self._run: RunState | None = None  # of the call under way
        self._context: StepContext | None = None
        self._recomputes = False  # a cached step is computed again
        self._backward = PendingBackward()

    def __getstate__(self) -> dict[str, Any]:
        gone = {"_patched": None, "_run": None, "_context": None, "_recomputes": False}
        return self.__dict__ | gone | {"_owner": {}}

    def __deepcopy__(self, memo: dict[int, Any]) -> DenoiserHook:
        copy = type(self).__new__(type(self))
        memo[id(self)] = copy
        copy.__dict__ |= deepcopy(self.__getstate__(), memo)
        if (other := memo.get(id(self.pipe))) is not None:  # the pipeline is being copied, too
            copy._patched = weakref.ref(other)
        return copy

    def summary(self) -> str:
        """What each call of the thread's last run was; of the last run of any, where it had none."""
        return self.runs.history.describe()

    def history(self) -> list[StepKind]:
        """The kind of each of these calls."""
        return list(self.runs.history.kinds)

    def switch(self, enabled: bool) -> None:
        """Let calls be the recipe's, or the model's own; either way the next begins a run."""
        self.enabled = enabled
        self.clean()

    def end_run(self, *args: Any, **kwargs: Any) -> None:
        """Let go of all that the thread's last run keeps; diffusers calls it when a pipeline is done."""
        self.runs.end()

    def clean(self) -> None:
        """Leave the U-Net as it was, and keep nothing of any thread's run.

        What a call was at when it was interrupted (Ctrl-C) is undone. Where a call of another thread is still
        under way, its own end does this.
        """
        self.runs.clear()
        if self._is_in_other_call():
            return
        if self.cache is not None:
            self.cache.stop()
        self._layers.clean()
        self._run = self._context = None
        self._recomputes = False
        self._backward = PendingBackward()
        self._owner.clear()

    @torch.compiler.disable
    def begin(self, unet: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Plan the U-Net call that starts."""
        if not self.enabled or self._is_recompute():
            return None
        self._enter(unet)
        if torch.jit.is_tracing():
            return self._leave_alone(_TRACED)
        try:
            latent, timestep = latent_and_timestep(unet, args, kwargs)
        except (KeyError, IndexError) as error:
            return self._leave_alone(
                f"agentsd: a call of the {type(unet).__name__} has no argument {error}, so it is left as it "
                "is; name latents and timestep as diffusers' forward does"
            )
        pipe = None if isinstance(self.pipe, Module) else self.pipe
        known = [] if pipe is None else schedulers_of(pipe)
        listed = own_list(timestep)
        if listed is None and known:
            listed = list_of(known[0])
        run = self._run = self.runs.of(listed if isinstance(listed, Tensor) else None)
        step = run.reader.read(timestep, listed)
        self._warn_of_early_steps(step)
        context = StepContext(latent, step.timestep, run.reader.step_index, run.stage(step, latent))
        if self.cache is not None:
            if step.first_call:
                run.scheduler = next((one for one in known if holds(one, run.reader.source)), None)
            context.inputs = named_arguments(unet, args, kwargs)
            self.cache.begin(unet, run, context, step)
        if step.first_call:
            run.history = History()
        self._context = context
        self._layers.plan(context)
        return None if self.cache is None else regroup(self.cache.skip(context), len(args))

    def _leave_alone(self, message: str) -> None:
        """Let the call that begins be the model's own."""
        self._warn(message)
        self.clean()

    @property
    def pipe(self) -> Any:
        """What was patched: a pipeline or a wrapper of the model; None where the model was, or it is gone."""
        return self._patched() if self._patched is not None else None

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
        self._run = self._context = None
        self._layers.lift_limits()  # the last call may have died before its end
        self._backward.enter(unet, self._layers)

    def _warn_of_early_steps(self, step: Step) -> None:
        phases = self._timing
        if not isinstance(phases, Phases) or not 0 < phases.early_frac < 1:
            return
        if step.has_no_early_step:
            self._warn(
                "agentsd: this run has no early step (img2img of low strength has none), so what runs early "
                f"never runs in it; raise early_frac={phases.early_frac:g} (1.0: every step)"
            )
        if step.off_list:
            self._warn(
                f"agentsd: timestep {step.timestep:g} is not one of the scheduler's, so early steps are "
                "guessed; pass an element of scheduler.timesteps to the U-Net, or apply agentsd to the "
                "pipeline"
            )

    @torch.compiler.disable
    def end(self, unet: Module, args: tuple[Any, ...], output: Any) -> Any:
        """Let go of everything that belongs to the call that ends."""
        if self._is_recompute() or self._owner.get("thread") != threading.get_ident():
            return None  # or it was refused, or left alone
        run, context = self._run, self._context
        self._run = self._context = None
        try:
            if run is not None and output is not None and context is not None:
                run.history.kinds.append(replace(context.kind, attention=self._layers.ran(context.kind)))
                self._layers.keep_residuals(context)
            self._layers.let_go(raised=output is None)
            self._backward.leave(output, self._layers)
            if self.cache is None or run is None:
                return None
            return self.cache.end(run, context, output, partial(self._recompute, unet, len(args)))
        finally:
            if run is not None:
                self.runs.note(run)
            self._owner.clear()
            if not self.enabled:  # any more: another thread has switched it off
                self.clean()

    def _is_recompute(self) -> bool:
        """Whether the call is a cached step that is computed again."""
        return self._recomputes and self._owner.get("thread") == threading.get_ident()

    def _recompute(self, unet: Module, positional: int, context: StepContext) -> Any:
        """Compute a cached step again, before the call after it ends."""
        args, kwargs = regroup(context.inputs, positional)  # as the caller does, for a compiled graph's sake
        residuals = context.residuals
        if residuals is not None and not residuals.fit(context.stage):
            # they are of another phase's operator by now
            context = replace(context, kind=replace(context.kind, attention=FULL))
        output, self._recomputes = None, True
        try:
            self._layers.plan(context, interpolate=True)
            output = self._called(unet)(*args, **kwargs)
        finally:
            self._recomputes = False
            self._layers.let_go(raised=output is None)
            self._backward.leave(output, self._layers)
        return output

    def _called(self, unet: Module) -> Any:
        """What the caller calls: the U-Net, or what `torch.compile` made of it."""
        own = self.pipe if isinstance(self.pipe, Module) else getattr(self.pipe, "unet", None)
        return own if getattr(own, "_orig_mod", None) is unet else unet
