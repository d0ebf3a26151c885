"""The hooks around a denoiser's calls: the one place that orders attention and caches."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from diffusers.utils import logging
from diffusers.utils.torch_utils import unwrap_module
from torch.nn import Module

from .attention.residual import FULL, SHARE
from .cache.plan import StepKind, describe
from .caching import Caching
from .checkpointing import PendingBackward
from .context import StepContext
from .hosts.models import latent_and_timestep, named_arguments, regroup
from .hosts.schedulers import find_scheduler, schedulers_of
from .hosts.timesteps import Step
from .layers import PatchedLayers
from .recipe import Recipe
from .run_state import RunState
from .schedule import Phases

logger = logging.get_logger(__name__)


class WarnOnce:
    """Logs each warning once."""

    def __init__(self) -> None:
        self._warned: set[str] = set()

    def __call__(self, message: str) -> None:
        """Log it, unless it was logged before."""
        if message not in self._warned:
            self._warned.add(message)
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
        run: the thread's run.
        enabled: at False calls are the model's own, and nothing is kept.
    """

    def __init__(
        self, recipe: Recipe, unet: Module, pipe: Any, layers: PatchedLayers, warn: Callable[[str], None]
    ) -> None:
        self._patched = None if pipe is unet else weakref.ref(pipe)
        self._schedulers: list[weakref.ref[Any]] = []  # that were met
        self._layers, self._warn = layers, warn
        self.cache = None
        if recipe.steps or recipe.guidance or recipe.residual:
            settings = recipe.steps, recipe.guidance, recipe.residual
            self.cache = Caching(unet, *settings, layers.states, warn)
            if self.cache.skipped is not None:
                layers.find_skipped(self.cache.skipped)
        self.run = RunState(recipe.timing)
        self.enabled = True
        self._timing = recipe.timing
        self._owner: dict[str, int] = {}  # the thread of the call under way
        self._context: StepContext | None = None
        self._last: tuple[str, list[StepKind]] = "", []  # of the last call's run, whichever thread it was of
        self._recomputes = False  # a cached step is computed again
        self._backward = PendingBackward()

    def __getstate__(self) -> dict[str, Any]:
        gone = {"_patched": None, "_context": None, "_recomputes": False}
        return self.__dict__ | gone | {"_owner": {}, "_schedulers": []}

    def summary(self) -> str:
        """What each call of the thread's last run was; of the last run of any, where it had none."""
        return self.run.describe() or self._last[0] or describe("")

    def history(self) -> list[StepKind]:
        """The kind of each of these calls."""
        return list(self.run.history or self._last[1])

    def reset(self, *args: Any, **kwargs: Any) -> None:
        """Let go of all that the thread's run keeps; diffusers calls it when a pipeline is done."""
        self.run.reset()

    def release(self) -> None:
        """Forget what the thread's run keeps, and a call that was interrupted, whichever thread it was of."""
        self.reset()
        self._owner.clear()

    def detach(self) -> None:
        """Skip no layer of the model, and keep nothing."""
        if self.cache is not None:
            self.cache.stop()
        self.reset()

    @torch.compiler.disable
    def begin(self, unet: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Plan the U-Net call that starts."""
        if not self.enabled or self._is_recompute():
            return None
        self._enter(unet)
        latent, timestep = latent_and_timestep(unet, args, kwargs)
        run, pipe = self.run, self._pipe()
        own = [] if pipe is None else schedulers_of(pipe)
        met = [scheduler for reference in self._schedulers if (scheduler := reference()) is not None]
        known = [*own, *met]
        step = run.reader.read(timestep, known[0] if known else None)
        self._warn_of_early_steps(step)
        context = StepContext(latent, step.timestep, run.stages(step, latent))
        if self.cache is not None:
            if step.first_call:
                run.scheduler = find_scheduler(run.reader.source, known)
                if run.scheduler is not None and all(one is not run.scheduler for one in met):
                    self._schedulers.append(weakref.ref(run.scheduler))
            context.inputs = named_arguments(unet, args, kwargs)
            self.cache.begin(unet, run, context, step, pipe)
        if step.first_call:
            run.history = []
        self._context = context
        self._layers.plan(context)
        return None if self.cache is None else regroup(self.cache.skip(context), len(args))

    def _pipe(self) -> Any:
        """The pipeline that was patched; None where the model was, or it is gone."""
        patched = self._patched() if self._patched is not None else None
        return None if isinstance(patched, Module) else patched

    def _enter(self, unet: Module) -> None:
        """Refuse a call that can't be served beside another; else take note of it."""
        me = threading.get_ident()
        owner = self._owner.setdefault("thread", me)  # at once, for all threads
        if owner != me and owner in sys._current_frames():  # the ids of the threads that live
            raise RuntimeError(
                "agentsd: this U-Net is in a call of another thread; let threads take turns (a lock around "
                "the pipeline's call), or give each a U-Net of its own (copy.deepcopy); call handle.reset() "
                "after a call that was interrupted"
            )
        self._owner["thread"] = me
        self._context = None
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
        if not self.enabled and self.cache is not None:
            self.cache.stop()
        if self._is_recompute() or self._owner.get("thread") != threading.get_ident():
            return None  # or it was refused, or they are not enabled
        context, self._context = self._context, None
        if output is not None and context is not None:
            shared = SHARE if self._layers.share else FULL
            self.run.history.append(replace(context.kind, attention=shared))
            self._layers.keep_residuals(context)
        self._layers.let_go(raised=output is None)
        self._backward.leave(output, self._layers)
        try:
            if self.cache is None:
                return None
            return self.cache.end(self.run, context, output, partial(self._recompute, unet, len(args)))
        finally:
            self._last = self.run.describe(), self.run.history
            self._owner.clear()

    def _is_recompute(self) -> bool:
        """Whether the call is a cached step that is computed again."""
        return self._recomputes and self._owner.get("thread") == threading.get_ident()

    def _recompute(self, unet: Module, positional: int, context: StepContext) -> Any:
        """Compute a cached step again, or the conditional half of one, before another call ends."""
        args, kwargs = regroup(context.inputs, positional)  # as the caller does, for a compiled graph's sake
        residuals = context.residuals
        if residuals is not None and not residuals.fit(context.stages):
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
        patched = self._patched() if self._patched is not None else None
        own = patched if isinstance(patched, Module) else getattr(patched, "unet", None)
        return own if isinstance(own, Module) and unwrap_module(own) is unet else unet
