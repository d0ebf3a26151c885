"""The hooks around a denoiser's calls: the one place that orders attention and caches."""

from __future__ import annotations

import re
import sys
import threading
import weakref
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from diffusers.utils import logging
from torch import Tensor
from torch.nn import Module

from .attention.residual import FULL
from .cache.plan import StepKind
from .caching import Caching
from .checkpointing import PendingBackward
from .context import StepContext
from .hosts.models import latent_and_timestep, named_arguments, regroup
from .hosts.timesteps import Step, list_of, own_list
from .layers import PatchedLayers
from .recipe import Recipe
from .run_state import History, Runs, RunState
from .sampler import holds, schedulers_of
from .schedule import Phases

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
