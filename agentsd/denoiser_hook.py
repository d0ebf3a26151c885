"""The hooks around a denoiser's calls: the one place that orders attention and caches."""

from __future__ import annotations

import sys
import threading
import warnings
import weakref
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from diffusers.utils.torch_utils import unwrap_module
from torch import Tensor
from torch.nn import Module

from .attention.operator import Plan
from .attention.processor import LayerState
from .attention.residual import FULL, SHARE
from .cache.plan import StepKind, describe
from .caching import Caching
from .context import StepContext
from .hosts.models import AttentionLayer, checkpoints, latent_and_timestep, named_arguments, regroup
from .hosts.schedulers import find_scheduler, schedulers_of
from .hosts.timesteps import Step
from .layers import Group, PatchedLayers
from .recipe import Recipe
from .run_state import RunState
from .schedule import Phases


class WarnOnce:
    """Warns of each thing once."""

    def __init__(self) -> None:
        self._warned: set[str] = set()

    def __call__(self, message: str) -> None:
        """Warn, unless it was said before."""
        if message not in self._warned:
            self._warned.add(message)
            warnings.warn(message, stacklevel=4)


class Graph:
    """Lives as long as a call's graph does; `computed` once its backward has begun."""

    computed = False

    def begin(self, grad: Tensor) -> None:
        """Hook of the output's gradient."""
        self.computed = True


class DenoiserHook:
    """Hooks around the calls of a U-Net, which run outside of a compiled graph: tensors may be read here.

    Attributes:
        layers: that are patched.
        cache: what is cached; None where nothing is.
        run: the thread's run.
        enabled: at False calls are the model's own, and nothing is kept.
    """

    def __init__(
        self,
        recipe: Recipe,
        unet: Module,
        pipe: Any,
        sites: list[AttentionLayer],
        states: list[LayerState],
        groups: list[Group],
        compiled: Any = None,
    ) -> None:
        self._pipe = None if pipe is None else weakref.ref(pipe)
        self._compiled = None if compiled is None else weakref.ref(compiled)
        self._schedulers = [] if pipe is None else list(map(weakref.ref, schedulers_of(pipe)))
        least_tokens = recipe.residual.least_tokens if recipe.residual else 0
        self._warn_once = WarnOnce()
        self.layers = PatchedLayers(sites, states, groups, least_tokens, self._warn_once)
        self.cache = None
        if recipe.steps or recipe.guidance or recipe.residual:
            self.cache = Caching(unet, recipe.steps, recipe.guidance, recipe.residual, states)
            if self.cache.skipped is not None:
                self.layers.find_skipped(self.cache.skipped)
        self.run = RunState(recipe.timing)
        self.enabled = True
        self._timing = recipe.timing
        self._caller: dict[str, int] = {}
        self._context: StepContext | None = None
        self._last: tuple[str, list[StepKind]] = "", []  # of the last call's run, whichever thread it was of
        self._recomputes = False  # a cached step is computed again
        self._checkpoints = False
        self._awaited: weakref.ref[Graph] | None = None
        self._plans: list[Plan | None] = []  # of a call whose backward is still to come

    def __getstate__(self) -> dict[str, Any]:
        gone = dict.fromkeys(("_pipe", "_compiled", "_awaited", "_context"))
        return self.__dict__ | gone | {"_caller": {}, "_plans": [], "_recomputes": False, "_schedulers": []}

    def summary(self) -> str:
        """What each call of the thread's last run was; of the last run of any, where it had none."""
        return self.run.describe() or self._last[0] or describe("")

    def history(self) -> list[StepKind]:
        """The kind of each of these calls."""
        return list(self.run.history or self._last[1])

    def reset(self, *args: Any, **kwargs: Any) -> None:
        """Let go of all that the thread's run keeps; diffusers calls it when a pipeline is done."""
        self.run.reset()

    def detach(self) -> None:
        """Leave the model whole, and nothing kept."""
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
        pipe, run = self._pipe() if self._pipe is not None else None, self.run
        known = self._known_schedulers(pipe)
        step = run.reader.read(timestep, known[0] if known else None)
        self._warn_of_early_steps(step)
        context = StepContext(latent, step.timestep, run.stages(step, latent))
        if self.cache is not None:
            if step.first_call:
                run.scheduler = find_scheduler(run.reader.source, known)
                self._remember(run.scheduler)
            context.inputs = named_arguments(unet, args, kwargs)
            self.cache.begin(unet, run, context, step, pipe)
            while self.cache.warnings:
                self._warn_once(self.cache.warnings.pop(0))
        if step.first_call:
            run.history = []
        self._context = context
        self.layers.plan(context)
        return None if self.cache is None else regroup(self.cache.start(context), len(args))

    def _known_schedulers(self, pipe: Any) -> list[Any]:
        """The pipeline's own, and those that were met before and live."""
        met = [scheduler for reference in self._schedulers if (scheduler := reference()) is not None]
        return met if pipe is None else [*schedulers_of(pipe), *met]

    def _remember(self, scheduler: Any) -> None:
        if scheduler is not None and all(reference() is not scheduler for reference in self._schedulers):
            self._schedulers.append(weakref.ref(scheduler))

    def _enter(self, unet: Module) -> None:
        """Refuse a call that can't be served beside another; else take note of it."""
        me = threading.get_ident()
        other = self._caller.setdefault("thread", me)
        if other != me and _is_inside(other, unet):  # or it was interrupted, and has left
            raise RuntimeError(
                "agentsd: this U-Net is in a call of another thread; let threads take turns (a lock around "
                "the pipeline's call), or give each a U-Net of its own (copy.deepcopy)"
            )
        self._caller["thread"] = me
        self._context = None
        self.layers.lift_limits()  # the last call may have died before its end
        graph = self._awaited() if self._awaited is not None else None
        awaits = graph is not None and not graph.computed
        self._checkpoints = checkpoints(unet)
        self._plans = self.layers.plans() if awaits else []
        if awaits and torch.is_grad_enabled():
            raise RuntimeError(
                "agentsd: a second forward before the backward of the first, under gradient checkpointing "
                "which would compute the first again with the second's tokens; call backward() after each "
                "forward (gradients add up), or unet.disable_gradient_checkpointing()"
            )

    def _warn_of_early_steps(self, step: Step) -> None:
        phases = self._timing
        if not isinstance(phases, Phases) or not 0 < phases.early_frac < 1:
            return
        if step.has_no_early_step:
            self._warn_once(
                "agentsd: this run has no early step (img2img of low strength has none), so what runs early "
                f"never runs in it; raise early_frac={phases.early_frac:g} (1.0: every step)"
            )
        if step.off_list:
            self._warn_once(
                f"agentsd: timestep {step.timestep:g} is not one of the scheduler's, so early steps are "
                "guessed; pass an element of scheduler.timesteps to the U-Net, or apply agentsd to the "
                "pipeline"
            )

    @torch.compiler.disable
    def end(self, unet: Module, args: tuple[Any, ...], output: Any) -> Any:
        """Let go of everything that belongs to the call that ends."""
        if not self.enabled and self.cache is not None:
            self.cache.stop()
        if self._is_recompute() or self._caller.get("thread") != threading.get_ident():
            return None  # or it was refused, or they are not enabled
        context, self._context = self._context, None
        if output is not None and context is not None:
            shared = SHARE if self.layers.share else FULL
            self.run.history.append(replace(context.kind, attention=shared))
            self.layers.keep_residuals(context)
        self._let_go(output)
        try:
            if self.cache is None:
                return None
            return self.cache.end(self.run, context, output, partial(self._recompute, unet, len(args)))
        finally:
            self._last = self.run.describe(), self.run.history
            self._caller.clear()

    def _is_recompute(self) -> bool:
        """Whether the call is a cached step that is computed again."""
        return self._recomputes and self._caller.get("thread") == threading.get_ident()

    def _recompute(self, unet: Module, positional: int, context: StepContext) -> Any:
        """Compute a cached step again, or the conditional half of one, before another call ends."""
        assert context.inputs is not None
        args, kwargs = regroup(context.inputs, positional)  # as the caller does, for a compiled graph's sake
        residuals = None if context.entry is None else context.entry.residuals
        if residuals is not None and not residuals.fit(context.stages):
            # they are of another phase's operator by now
            context = replace(context, kind=replace(context.kind, attention=FULL))
        output, self._recomputes = None, True
        try:
            self.layers.plan(context, between=True)
            output = self._called(unet)(*args, **kwargs)
        finally:
            self._recomputes = False
            self._let_go(output)
        return output

    def _called(self, unet: Module) -> Any:
        """What the caller calls: the U-Net, or what `torch.compile` made of it."""
        pipe = self._pipe() if self._pipe is not None else None
        own = getattr(pipe, "unet", None)
        if own is None and self._compiled is not None:
            own = self._compiled()
        return own if isinstance(own, Module) and unwrap_module(own) is unet else unet

    def _let_go(self, output: Any) -> None:
        """Forget what the layers hold of a call that gave this; None if it raised.

        Plans are kept where checkpointing may compute the layers again after the call.
        """
        self.layers.let_go(raised=output is None)
        first = output[0] if isinstance(output, tuple) else getattr(output, "sample", None)
        if isinstance(first, Tensor) and first.requires_grad:
            if self._checkpoints:
                graph = Graph()
                first.register_hook(graph.begin)
                self._awaited = weakref.ref(graph)
            return
        self.layers.set_plans(self._plans)


def _is_inside(thread: int, unet: Module) -> bool:
    """Whether a thread is in a call of the U-Net."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        if frame.f_code.co_name == "_call_impl" and frame.f_locals.get("self") is unet:
            return True
        frame = frame.f_back
    return False
