"""The calls of a patched U-Net: what each of them runs, and which are refused."""

from __future__ import annotations

import math
import sys
import threading
import warnings
import weakref
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from diffusers.utils.torch_utils import unwrap_module
from torch import Tensor
from torch.nn import Module

from .attention import Operator, PooledAgents
from .attention.operator import Place, Plan
from .attention.processor import AgentAttnProcessor, LayerState, Work, is_ours
from .attention.residual import FULL, KEEP, PLAIN, SHARE
from .cache.plan import COMPUTED, tell
from .cache.residuals import Residuals
from .cache.run import Caching
from .hosts.models import Site, checkpoints, is_plain, latent_and_timestep, named_arguments, regroup
from .hosts.schedulers import find_scheduler, schedulers_of
from .recipe import Recipe
from .schedule import ByDistance, Phases
from .steps.distance import LatentDistance
from .steps.run import RunReader, Step


@dataclass
class Group:
    """Layers on one token grid that share a plan: a whole level, or one layer that makes its own.

    Attributes:
        site: the group's first layer.
        index: its number; part of the key of its random cells.
        stages: what it runs in each stage of a run.
        coarseness: side of its tokens, in tokens of the finest patched level.
        seed: of the random cells.
        deep: a cached step skips all of its layers.
        work: of the call under way.
    """

    site: Site
    index: int
    stages: tuple[Operator | None, ...]
    coarseness: int
    seed: int
    deep: bool = False
    work: Work = field(default_factory=Work)

    def begin(self, latent: Tensor, timestep: float, stages: tuple[int, ...]) -> None:
        """Make the plan of a call on a latent (B, ..., H, W).

        Args:
            latent: what the denoiser is called on.
            timestep: its noise level.
            stages: of its images, or of the conditional half of them where only that is computed.
        """
        grid = self.site.grid(latent)
        frames = latent.shape[2] if latent.ndim == 5 else 1  # a video's frames are images to the layers
        each = [self.stages[stage if len(self.stages) > 1 else 0] for stage in stages for _ in range(frames)]
        key = (self.seed, self.index, timestep)
        half = len(stages) < latent.shape[0]
        place = Place(grid, self.coarseness, len(each), latent.device, key, half)
        self.work.grid = grid
        operator = each[0]
        if len(set(each)) > 1 and isinstance(operator, PooledAgents):
            every = [stage for stage in self.stages if isinstance(stage, PooledAgents)]
            self.work.plan = operator.plan_each(place, each, every)  # type: ignore[arg-type]
        else:
            self.work.plan = None if operator is None else operator.plan(place)


class Planned(NamedTuple):
    """What the groups' plans of a call are made from: the arguments of `Group.begin`, and how residuals are
    shared: what the layers compute, the residuals that are known, the noise level."""

    latent: Tensor
    timestep: float
    stages: tuple[int, ...]
    attention: str = PLAIN
    residuals: Residuals | None = None
    sigma: float | None = None


class Run(threading.local):
    """A thread's run: where it is, how far its latents moved, and what its calls were."""

    def __init__(self, timing: Phases | ByDistance | None) -> None:
        self.timing = timing
        self.reader = RunReader(timing.early_frac if isinstance(timing, Phases) else 0.0)
        self.scheduler: Any = None
        self.symbols = ""
        self.attention: list[str] = []
        self.distance = None
        if isinstance(timing, ByDistance):
            self.distance = LatentDistance(timing.thresholds, timing.per == "sample")

    def __reduce__(self) -> tuple[Any, ...]:  # a copy begins anew
        return Run, (self.timing,)

    def stages(self, step: Step, latent: Tensor) -> tuple[int, ...]:
        """The stage of each image."""
        if self.distance is not None:
            return self.distance.read(latent, step.opens, step.repeats)
        return (0 if step.early or self.timing is None else 1,) * latent.shape[0]


class Graph:
    """Lives as long as a call's graph does; `computed` once its backward has begun."""

    computed = False

    def begin(self, grad: Tensor) -> None:
        """Hook of the output's gradient."""
        self.computed = True


class Calls:
    """Hooks around the calls of a U-Net, which run outside of a compiled graph: tensors may be read here."""

    def __init__(
        self,
        recipe: Recipe,
        unet: Module,
        pipe: Any,
        sites: list[Site],
        layers: list[LayerState],
        groups: list[Group],
        compiled: Any = None,
    ) -> None:
        self._sites, self._layers, self._groups = sites, layers, groups
        self._pipe = None if pipe is None else weakref.ref(pipe)
        self._compiled = None if compiled is None else weakref.ref(compiled)
        self._schedulers = [] if pipe is None else list(map(weakref.ref, schedulers_of(pipe)))
        self.cache = None
        if recipe.steps or recipe.guidance or recipe.residual:
            self.cache = Caching(unet, recipe.steps, recipe.guidance, recipe.residual, layers)
            self._find_deep()
        self._least_tokens = recipe.residual.least_tokens if recipe.residual else 0
        self._timing = recipe.timing
        self._run = Run(recipe.timing)
        self._caller: dict[str, int] = {}
        self._kind = COMPUTED
        self._planned: Planned | None = None
        self._told = ""  # of the last call's run, whichever thread it was of
        self._again = False  # a cached step is computed once more
        self._limits: ExitStack | None = None  # what is set for the call under way
        self._recomputes = False
        self._awaited: weakref.ref[Graph] | None = None
        self._kept: list[Plan | None] = []  # of a call whose backward is still to come
        self._said: set[str] = set()

    def __getstate__(self) -> dict[str, Any]:
        gone = dict.fromkeys(("_pipe", "_compiled", "_limits", "_awaited", "_planned"))
        return self.__dict__ | gone | {"_caller": {}, "_kept": [], "_again": False, "_schedulers": []}

    def summary(self) -> str:
        """What each call of the thread's last run was; of the last run of any, where it had none."""
        return self._summary() if self._run.symbols else self._told or tell("")

    def _summary(self) -> str:
        corrected = self.cache.corrected if self.cache is not None else 0
        return tell(self._run.symbols, corrected, self._run.attention)

    @torch.compiler.disable
    def begin(self, unet: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Plan the U-Net call that starts."""
        if self._is_again():
            return None
        self._enter(unet)
        latent, timestep = latent_and_timestep(unet, args, kwargs)
        pipe, run = self._pipe() if self._pipe is not None else None, self._run
        known = self._known_schedulers(pipe)
        step = run.reader.read(timestep, known[0] if known else None)
        self._tell(step)
        stages, kind, given = run.stages(step, latent), COMPUTED, None
        if self.cache is not None:
            if step.opens:
                run.scheduler = find_scheduler(run.reader.source, known)
                self._remember(run.scheduler)
            given = named_arguments(unet, args, kwargs)
            kind, given = self.cache.begin(unet, step, run.reader, stages, given, pipe, run.scheduler)
            while self.cache.words:
                self._say_once(self.cache.words.pop(0))
        self._kind = kind
        if step.opens:
            run.symbols, run.attention = "", []
        if not kind.guided:
            stages = stages[len(stages) // 2 :]
        residuals, sigma = self.cache.sharing if self.cache is not None else (None, None)
        planned = Planned(latent, step.timestep, stages, kind.attention, residuals, sigma)
        self._planned = planned
        self._plan(planned, kind.computed)
        if self.cache is None or given is None:
            return None
        return regroup(self.cache.start(given, planned), len(args))

    def _known_schedulers(self, pipe: Any) -> list[Any]:
        """The pipeline's own, and those that were met before and live."""
        met = [scheduler for reference in self._schedulers if (scheduler := reference()) is not None]
        return met if pipe is None else [*schedulers_of(pipe), *met]

    def _remember(self, scheduler: Any) -> None:
        if scheduler is not None and all(reference() is not scheduler for reference in self._schedulers):
            self._schedulers.append(weakref.ref(scheduler))

    def _plan(self, planned: Planned, computed: bool, between: bool = False) -> None:
        """Make the plans of a call, and hold its layers."""
        for index, group in enumerate(self._groups):
            if computed or not group.deep:
                self._plan_group(index, group, planned)
        for site, layer in zip(self._sites, self._layers, strict=True):
            layer.held = self.claim(site.attn, layer)
            layer.attention, layer.residual = planned.attention, None
        if planned.attention == SHARE and planned.residuals is not None:
            planned.residuals.give(planned.sigma, len(planned.stages), between)
        if any(group.site.block._compiled_call_impl is not None for group in self._groups):
            # Blocks that are compiled one by one run the same code, and each kind of block is a recompilation
            # of it: of a group the one that ranks and the others, in either phase.
            limit = torch._dynamo.config.recompile_limit + 4 * len(self._groups)
            self._limits = ExitStack()
            self._limits.enter_context(torch._dynamo.config.patch(recompile_limit=limit))

    def _plan_group(self, index: int, group: Group, planned: Planned) -> None:
        latent, timestep, stages, attention, residuals, _ = planned
        if residuals is not None and attention in (SHARE, KEEP) and residuals.fit(stages):
            group.work.grid = group.site.grid(latent)
            group.work.plan = residuals.plan_of(index, len(stages))
        elif attention == FULL or self._is_small(group, latent, attention):
            group.work.plan = None
        else:
            group.begin(latent, timestep, stages)
            if attention == KEEP and group.work.plan is not None:
                group.work.plan.hold()

    def _is_small(self, group: Group, latent: Tensor, attention: str) -> bool:
        """Whether the grid is too small for residuals to be shared."""
        tokens = math.prod(group.site.grid(latent)) * group.coarseness**2
        return attention == KEEP and tokens < self._least_tokens

    def _keep_residuals(self) -> None:
        """Keep what the layers found, where the call that ends computed full attention and operators."""
        planned = self._planned
        if planned is not None and planned.attention == KEEP and planned.residuals is not None:
            plans = {i: plan for i, group in enumerate(self._groups) if (plan := group.work.plan) is not None}
            planned.residuals.keep(planned.sigma, planned.stages, plans)

    def _find_deep(self) -> None:
        """Note the groups that a cached step skips."""
        skipped = self.cache.skipped if self.cache is not None else None
        for group in self._groups:
            sited = zip(self._sites, self._layers, strict=True)
            blocks = [site.block for site, layer in sited if layer.work is group.work]
            group.deep = skipped is not None and all(map(skipped.holds, blocks))

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
        if self._limits is not None:  # the last call died before its end
            self._limits.close()
            self._limits = None
        graph = self._awaited() if self._awaited is not None else None
        awaits = graph is not None and not graph.computed
        self._recomputes = checkpoints(unet)
        self._kept = [group.work.plan for group in self._groups] if awaits else []
        if awaits and torch.is_grad_enabled():
            raise RuntimeError(
                "agentsd: a second forward before the backward of the first, under gradient checkpointing "
                "which would compute the first again with the second's tokens; call backward() after each "
                "forward (gradients add up), or unet.disable_gradient_checkpointing()"
            )

    def _tell(self, step: Step) -> None:
        phases = self._timing
        if not isinstance(phases, Phases) or not 0 < phases.early_frac < 1:
            return
        if step.opens_without_early:
            self._say_once(
                "agentsd: this run has no early step (img2img of low strength has none), so what runs early "
                f"never runs in it; raise early_frac={phases.early_frac:g} (1.0: every step)"
            )
        if step.off_list:
            self._say_once(
                f"agentsd: timestep {step.timestep:g} is not one of the scheduler's, so early steps are "
                "guessed; pass an element of scheduler.timesteps to the U-Net, or apply agentsd to the "
                "pipeline"
            )

    @torch.compiler.disable
    def end(self, unet: Module, args: tuple[Any, ...], output: Any) -> Any:
        """Let go of everything that belongs to the call that ends."""
        if self._is_again() or self._caller.get("thread") != threading.get_ident():
            return None  # or it was refused
        if output is not None:
            self._run.symbols += self._kind.symbol
            shares = any(layer.attention == SHARE for layer in self._layers)
            self._run.attention.append(SHARE if shares else FULL)
            self._keep_residuals()
        self._planned = None
        self._let_go(output)
        try:
            if self.cache is None:
                return None
            return self.cache.end(output, partial(self._compute, unet, len(args)))
        finally:
            self._told = self._summary()
            self._caller.clear()

    def _is_again(self) -> bool:
        """Whether the call is a cached one once more."""
        return self._again and self._caller.get("thread") == threading.get_ident()

    def _compute(self, unet: Module, positional: int, given: dict[str, Any], planned: Planned) -> Any:
        """Compute a cached step, or the conditional half of one, once more before another ends."""
        args, kwargs = regroup(given, positional)  # as the caller does, for a compiled graph's sake
        pictures = given["sample"].shape[0]
        output, self._again = None, True
        try:
            planned = planned._replace(stages=planned.stages[-pictures:])
            if planned.residuals is not None and not planned.residuals.fit(planned.stages):
                planned = planned._replace(attention=FULL)  # they are of another phase's operator by now
            self._plan(planned, computed=False, between=True)
            output = self._called(unet)(*args, **kwargs)
        finally:
            self._again = False
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
        """Forget what the layers hold of a call that gave this; None if it raised."""
        if self._limits is not None:
            self._limits.close()
            self._limits = None
        for layer in self._layers:
            if layer.block_input is not None and output is not None:
                self._say_once(
                    f"agentsd: {layer.name} was computed without its attention processor (T-GATE does so); "
                    "it was left untouched"
                )
            if layer.mismatch:
                self._say_once(
                    f"agentsd: {layer.name} got {layer.mismatch} tokens where the latent's size gives "
                    f"{layer.work.tokens}; it was left untouched"
                )
            layer.block_input, layer.mismatch = None, 0
            layer.attention, layer.residual = PLAIN, None
        self._keep_or_forget(output)

    def _keep_or_forget(self, output: Any) -> None:
        """Keep the plans where checkpointing may compute the layers again after the call."""
        first = output[0] if isinstance(output, tuple) else getattr(output, "sample", None)
        if isinstance(first, Tensor) and first.requires_grad:
            if self._recomputes:
                graph = Graph()
                first.register_hook(graph.begin)
                self._awaited = weakref.ref(graph)
            return
        for i, group in enumerate(self._groups):
            group.work.plan = self._kept[i] if self._kept else None

    def claim(self, attn: Any, layer: LayerState) -> bool:
        """Hold the layer, also where the host has since put a plain processor there."""
        if not is_ours(attn.processor):
            if not is_plain(attn.processor):
                kind = type(attn.processor).__name__
                self._say_once(f"agentsd: {layer.name} now has a {kind}; it is left untouched")
                return False
            attn.set_processor(AgentAttnProcessor(attn.processor))
        return True

    def _say_once(self, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            warnings.warn(message, stacklevel=3)


def _is_inside(thread: int, unet: Module) -> bool:
    """Whether a thread is in a call of the U-Net."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        if frame.f_code.co_name == "_call_impl" and frame.f_locals.get("self") is unet:
            return True
        frame = frame.f_back
    return False
