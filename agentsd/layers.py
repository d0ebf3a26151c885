"""The patched layers: those that share a plan, and what they all run in a call."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from .attention import Operator
from .attention.operator import MODULE, GridContext, Plan
from .attention.processor import AgentAttnProcessor, LayerState, Work, is_ours
from .hosts import AttentionLayer, checkpoints, find_attention_layers, frames_of, is_plain, is_tomesd_block
from .memory import StepContext
from .modules.adapter import NamedLayer, build_module
from .modules.operators import TrainedOperator
from .plan import FULL, KEEP, OPERATOR, SHARE, StepKind
from .recipe import Recipe, stages_of
from .skip import SkippedLayers


class _Graph:
    """Lives as long as a call's graph does; `computed` once its backward has begun."""

    computed = False

    def begin(self, grad: Tensor) -> None:
        """Hook of the output's gradient."""
        self.computed = True


class PendingBackward:
    """Keeps the layers' plans where a call's backward will compute the layers again."""

    def __init__(self) -> None:
        self._checkpoints = False
        self._graph: weakref.ref[_Graph] | None = None
        self._plans: list[Plan | None] = []

    def __reduce__(self) -> tuple[Any, ...]:  # a copy has no call under way
        return PendingBackward, ()

    def enter(self, model: Module, layers: PatchedLayers) -> None:
        """Note whether the call that begins is to be computed again.

        Raises:
            RuntimeError: the backward of the call before is still to come, and would see this one's plans.
        """
        graph = self._graph() if self._graph is not None else None
        awaited = graph is not None and not graph.computed
        self._checkpoints = checkpoints(model)
        self._plans = layers.plans() if awaited else []
        if awaited and torch.is_grad_enabled():
            raise RuntimeError(
                "agentsd: a second forward before the backward of the first, under gradient checkpointing "
                "which would compute the first again with the second's tokens; call backward() after each "
                "forward (gradients add up), or unet.disable_gradient_checkpointing()"
            )

    def leave(self, output: Any, layers: PatchedLayers) -> None:
        """Drop the plans of the call that gave this (None if it raised), unless its backward needs them."""
        sample = output[0] if isinstance(output, tuple) else getattr(output, "sample", None)
        if not isinstance(sample, Tensor) or not sample.requires_grad:
            layers.set_plans(self._plans)
        elif self._checkpoints:
            graph = _Graph()
            sample.register_hook(graph.begin)
            self._graph = weakref.ref(graph)


@dataclass
class Group:
    """Layers on one token grid that share a plan: a whole level, or one layer that makes its own.

    Attributes:
        layer: the group's first layer.
        index: its number; part of the key of its random destinations.
        stages: what it runs in each stage of a run.
        downsampling_factor: side of its tokens, in tokens of the finest patched level.
        seed: of the random destinations.
        skipped: a cached step skips all of its layers.
        work: of the call under way.
    """

    layer: AttentionLayer
    index: int
    stages: tuple[Operator | None, ...]
    downsampling_factor: int
    seed: int
    skipped: bool = False
    work: Work = field(default_factory=Work)

    def operator(self, stage: int) -> Operator | None:
        """What runs in a stage of a run."""
        return self.stages[stage if len(self.stages) > 1 else 0]

    def begin(self, latent: Tensor, timestep: float, stage: int, shared: dict[int, Any]) -> None:
        """Make the plan of a call on a latent (B, ..., H, W).

        Args:
            latent: what the denoiser is called on.
            timestep: its noise level.
            stage: of the run.
            shared: plans of the call by level; an operator that ranks for a whole level has one there.
        """
        key = (self.seed, self.index, timestep)
        operator, level = self.operator(stage), self.downsampling_factor
        context = GridContext(self.layer.grid(latent), level, latent.device, key)
        if operator is None or operator.own_ranking:
            self.work.plan = None if operator is None else operator.plan(context)
        else:
            if level not in shared:
                shared[level] = operator.plan(context)
            self.work.plan = shared[level]


class PatchedLayers:
    """The layers that a recipe patches: what each runs in a call, and what it holds of the call.

    Args:
        model: the denoiser; nothing of it is changed yet.
        recipe: says which layers, and what they run.
        warn: warns the user, once of each thing.

    Attributes:
        attention_layers: where the layers are.
        states: what each knows.
        groups: those that share a plan.
        modules: the trained module of each, where it has one.

    Raises:
        ValueError: the model lacks such a layer, or another package holds it.
    """

    def __init__(self, model: Any, recipe: Recipe, warn: Callable[[str], None]) -> None:
        self.attention_layers: list[AttentionLayer] = []
        if recipe.attention is not None:
            some = recipe.levels is None  # two, or one where there is one
            self.attention_layers = find_attention_layers(model, recipe.levels or 2, at_most=some)
        self.states: list[LayerState] = []
        self.modules: list[Module | None] = []
        self._config, self._warn = model.config, warn
        residual = recipe.residual
        self._least_tokens = residual.least_tokens if residual else 0
        self._cached_alone = residual is not None and residual.interval == 1
        self._hooks: list[Any] = []
        self._limits: ExitStack | None = None  # what is set for the call under way
        stages = stages_of(recipe.attention)
        own = any(operator.own_ranking for operator in recipe.operators)
        trained = [operator for operator in recipe.operators if isinstance(operator, TrainedOperator)]
        finest = min((layer.downsampling_factor for layer in self.attention_layers), default=1)
        groups: dict[int, Group] = {}
        for i, layer in enumerate(self.attention_layers):
            _check_free(layer)
            group = Group(layer, i, stages, layer.downsampling_factor // finest, recipe.seed)
            group = groups.setdefault(i if own else layer.downsampling_factor, group)
            self.states.append(LayerState(layer.name, group.work))
            self.modules.append(build_module(layer, trained[0], recipe.seed, model) if trained else None)
        self.groups = list(groups.values())
        self._skipped = [False] * len(self.states)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_limits": None}

    @property
    def named(self) -> list[NamedLayer]:
        """Each layer with its name and its trained module."""
        layers = zip(self.attention_layers, self.modules, strict=True)
        return [(layer.name, layer.attn, module) for layer, module in layers]

    def attach(self) -> None:
        """Put a processor, a trained module and a hook into each layer."""
        for layer, state, module in zip(self.attention_layers, self.states, self.modules, strict=True):
            attn: Any = layer.attn
            attn._agentsd = state
            self._claim(attn, state)
            if module is not None:
                attn.add_module(MODULE, module)
            self._hooks.append(layer.block.norm1.register_forward_pre_hook(state.note_input))

    def detach(self) -> None:
        """Take them out again, also after an attachment that broke off."""
        while self._hooks:
            self._hooks.pop().remove()
        for layer, state in zip(self.attention_layers, self.states, strict=True):
            attn: Any = layer.attn
            if not hasattr(attn, "_agentsd"):
                continue
            if hasattr(attn, MODULE):
                delattr(attn, MODULE)
            if is_ours(attn.processor):
                attn.set_processor(attn.processor.fallback)
            del attn._agentsd
            state.work.plan = None

    def find_skipped(self, skipped: SkippedLayers) -> None:
        """Note the layers, and the groups, that a cached step skips."""
        self._skipped = [skipped.holds(layer.block) for layer in self.attention_layers]
        for group in self.groups:
            states = zip(self._skipped, self.states, strict=True)
            group.skipped = all(gone for gone, state in states if state.work is group.work)

    def plan(self, context: StepContext, interpolate: bool = False) -> None:
        """Make the plans of a call, and hold its layers.

        Args:
            context: of the call.
            interpolate: it is computed again, at a noise level between those that residuals are known at.
        """
        computed, attention = context.kind.computed, context.kind.attention
        # Where cached steps alone share residuals, the layers that they skip need none.
        unused = attention == KEEP and self._cached_alone
        shared: dict[int, Plan | None] = {}
        for index, group in enumerate(self.groups):
            if not group.skipped or (computed and not unused):
                self._plan_group(index, group, context, shared)
        for layer, state, gone in zip(self.attention_layers, self.states, self._skipped, strict=True):
            state.held = self._claim(layer.attn, state)
            state.attention, state.residual = FULL if gone and unused else attention, None
        if attention == SHARE and (residuals := context.residuals) is not None:
            run = [computed or not gone for gone in self._skipped]
            residuals.give(context.sigma, interpolate, run)
        if any(group.layer.block._compiled_call_impl is not None for group in self.groups):
            # Blocks that are compiled one by one run the same code, and each kind of block is a recompilation
            # of it: of a group the one that ranks and the others, in either phase. As CUDA graphs they may
            # overwrite what those before them in the call gave, maps of tokens too, unless it is one step.
            torch.compiler.cudagraph_mark_step_begin()
            limit = torch._dynamo.config.recompile_limit + 4 * len(self.groups)
            self._limits = ExitStack()
            self._limits.enter_context(torch._dynamo.config.patch(recompile_limit=limit))

    def _plan_group(
        self, index: int, group: Group, context: StepContext, shared: dict[int, Plan | None]
    ) -> None:
        attention, stage, residuals = context.kind.attention, context.stage, context.residuals
        latent = context.latent
        group.work.grid = group.layer.grid(latent)
        group.work.images = latent.shape[0] * frames_of(self._config, latent)
        if residuals is not None and attention in (SHARE, KEEP) and residuals.fit(stage):
            group.work.plan = residuals.plan_of(index)
        elif attention == FULL or self._is_small(group, context):
            group.work.plan = None
        else:
            group.begin(latent, context.timestep, stage, shared)
            if attention == KEEP and group.work.plan is not None:
                group.work.plan.hold()

    def _is_small(self, group: Group, context: StepContext) -> bool:
        """Whether the grid is too small for residuals to be shared."""
        tokens = math.prod(group.layer.grid(context.latent)) * group.downsampling_factor**2
        return context.kind.attention == KEEP and tokens < self._least_tokens

    def ran(self, kind: StepKind) -> str:
        """What the layers computed, all in all, in the call of that kind that ends."""
        if any(state.attention == SHARE for state in self.states):
            return SHARE
        return OPERATOR if kind.attention == OPERATOR and any(self.plans()) else FULL

    def keep_residuals(self, context: StepContext) -> None:
        """Keep what the layers found, where the call that ends computed full attention and operators."""
        if context.kind.attention == KEEP and context.residuals is not None:
            plans = {i: plan for i, plan in enumerate(self.plans()) if plan is not None}
            if any(state.compiled for state in self.states):  # as a CUDA graph, which overwrites what it gave
                for state in self.states:
                    state.residual = None if state.residual is None else state.residual.clone()
                plans = deepcopy(plans)
            context.residuals.keep(context.sigma, context.stage, plans)

    def plans(self) -> list[Plan | None]:
        """Those of the call under way, one a group."""
        return [group.work.plan for group in self.groups]

    def set_plans(self, plans: list[Plan | None]) -> None:
        """Put plans in their place; none where the list is empty."""
        for i, group in enumerate(self.groups):
            group.work.plan = plans[i] if plans else None

    def lift_limits(self) -> None:
        """Set nothing any more for a call."""
        if self._limits is not None:
            self._limits.close()
            self._limits = None

    def clean(self) -> None:
        """Let each layer be the model's own, whatever a call was at."""
        self.let_go(raised=True)
        self.set_plans([])

    def let_go(self, raised: bool) -> None:
        """Forget what the layers hold of a call that ends, but their plans."""
        self.lift_limits()
        for state in self.states:
            if state.block_input is not None and not raised:
                self._warn(
                    f"agentsd: {state.name} was computed without its attention processor (T-GATE does so); "
                    "it was left untouched"
                )
            if state.mismatch is not None and not raised:
                images, tokens = state.mismatch
                self._warn(
                    f"agentsd: {state.name} got {tokens} tokens of {images} images where the latent's size "
                    f"gives {state.work.tokens} of {state.work.images}; it was left untouched"
                )
            state.block_input, state.mismatch = None, None
            state.attention, state.residual = OPERATOR, None

    def _claim(self, attn: Any, state: LayerState) -> bool:
        """Hold a layer, also where the host has since put a plain processor there."""
        if not is_ours(attn.processor):
            if not is_plain(attn.processor):
                kind = type(attn.processor).__name__
                self._warn(f"agentsd: {state.name} now has a {kind}; it is left untouched")
                return False
            attn.set_processor(AgentAttnProcessor(attn.processor))
        return True


def _check_free(layer: AttentionLayer) -> None:
    if is_tomesd_block(layer.block):
        raise ValueError(f"{layer.name} is patched by tomesd: call tomesd.remove_patch(pipe) first")
    processor = fallback_of(layer.attn.processor)
    if not is_plain(processor):
        raise ValueError(
            f"{layer.name} has a {type(processor).__name__}, which agent attention would replace: "
            "set it to AttnProcessor2_0 first (unet.set_attn_processor), or leave this pipeline unpatched"
        )


def fallback_of(processor: Any) -> Any:
    """The processor itself, or the one that ours stands in for."""
    return processor.fallback if is_ours(processor) else processor
