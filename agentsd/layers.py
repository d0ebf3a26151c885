"""The patched attention layers: which of them share a plan, and what they run in each call."""

from __future__ import annotations

import math
import weakref
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from .attention.operator import MODULE, Plan
from .attention.processor import AgentAttnProcessor, Group, Plans
from .hosts import AttentionLayer, find_attention_layers, frames_of, is_plain, remove_hooks
from .memory import Residuals
from .modules.adapter import NamedLayer, build_module
from .modules.operators import TrainedOperator
from .plan import FULL, KEEP, OPERATOR, SHARE, Call, CallKind, ResidualSharing
from .recipe import Recipe, stages_of
from .skip import SkippedLayers
from .warn import WarnOnce


class _Graph:
    """Lives as long as a call's autograd graph; `computed` is set once its backward starts."""

    computed = False

    def begin(self, grad: Tensor) -> None:
        """Hook on the output's gradient."""
        self.computed = True


class PendingBackward:
    """Keeps the layers' plans until a call's backward, if gradient checkpointing computes them again."""

    def __init__(self) -> None:
        self._checkpoints = False
        self._graph: weakref.ref[_Graph] | None = None
        self._plans: list[Plan | None] = []

    def __reduce__(self) -> tuple[Any, ...]:  # a copy has no call in progress
        return PendingBackward, ()

    def enter(self, model: Module, plans: list[Plan | None]) -> None:
        """Start a call, while the layers still have the plans of the previous one.

        Raises:
            RuntimeError: the backward of the previous call is still to come and would use this call's plans.
        """
        graph = self._graph() if self._graph is not None else None
        awaited = graph is not None and not graph.computed
        self._checkpoints = torch.is_grad_enabled() and any(
            module.training and getattr(module, "gradient_checkpointing", False) for module in model.modules()
        )
        self._plans = plans if awaited else []
        if awaited and torch.is_grad_enabled():
            raise RuntimeError(
                "agentsd: a second forward before the backward of the first, under gradient checkpointing "
                "which would compute the first again with the second's tokens; call backward() after each "
                "forward (gradients add up), or unet.disable_gradient_checkpointing()"
            )

    def leave(self, output: Any) -> list[Plan | None] | None:
        """Return the plans that the layers get after a call; [] as a rule, for none.

        Args:
            output: what the call returned; None if it raised.

        Returns:
            None if the layers keep the call's plans, which its backward needs.
        """
        sample = output[0] if isinstance(output, tuple) else getattr(output, "sample", None)
        if not (self._checkpoints and isinstance(sample, Tensor) and sample.requires_grad):
            return self._plans
        graph = _Graph()
        sample.register_hook(graph.begin)
        self._graph = weakref.ref(graph)
        return None


class RecompileLimit:
    """Dynamo's recompile limit, raised during a call.

    All blocks run the same code, and each kind of block is a recompilation of it. In a group, the block that
    ranks the tokens and the others differ, and so do the phases.
    """

    def __init__(self) -> None:
        self._before: int | None = None

    def __reduce__(self) -> tuple[Any, ...]:  # a copy has no call in progress
        return RecompileLimit, ()

    def raise_for(self, groups: int) -> None:
        """Let the blocks of this many groups be compiled as often as they must be."""
        self.lift()
        self._before = torch._dynamo.config.recompile_limit
        torch._dynamo.config.recompile_limit = self._before + 4 * groups

    def lift(self) -> None:
        """Restore the limit."""
        if self._before is not None:
            torch._dynamo.config.recompile_limit = self._before
            self._before = None


class PatchedLayers:
    """The layers that a recipe patches: what each runs in a call, and what it holds during the call.

    Args:
        model: the denoiser; it isn't changed yet.
        recipe: says which layers are patched, and what they run.
        warn: warns the user, once about each thing.

    Attributes:
        processors: the attention processor that each layer gets during a call.
        groups: the groups of layers that share a plan.

    Raises:
        ValueError: the model has no such layer, or another package has patched it.
    """

    def __init__(self, model: Any, recipe: Recipe, warn: WarnOnce) -> None:
        layers: list[AttentionLayer] = []
        if recipe.attention is not None:
            some = recipe.levels is None  # two levels, or one if there is only one
            layers = find_attention_layers(model, recipe.levels or 2, at_most=some)
        self._config, self._warn, self._residual = model.config, warn, recipe.residual
        self._backward, self._limit = PendingBackward(), RecompileLimit()
        self.processors: list[AgentAttnProcessor] = []
        stages = stages_of(recipe.attention)
        own = any(operator.own_ranking for operator in recipe.operators)
        trained = [operator for operator in recipe.operators if isinstance(operator, TrainedOperator)]
        finest = min((layer.downsampling_factor for layer in layers), default=1)
        groups: dict[int, Group] = {}
        for i, layer in enumerate(layers):
            _check_free(layer)
            group = Group(layer.grid, i, stages, layer.downsampling_factor // finest, recipe.seed)
            group = groups.setdefault(i if own else layer.downsampling_factor, group)
            module = build_module(layer, trained[0], recipe.seed, model) if trained else None
            self.processors.append(AgentAttnProcessor(layer, layer.attn.processor, group, module))
        self.groups = list(groups.values())

    @property
    def named(self) -> list[NamedLayer]:
        """Each layer with its name and its trained module."""
        return [(one.layer.name, one.layer.attn, one.module) for one in self.processors]

    def attach(self) -> None:
        """Add a hook, and a trained module if there is one, to each layer."""
        for one in self.processors:
            if one.module is not None:
                one.layer.attn.add_module(MODULE, one.module)
            one.layer.block.norm1.register_forward_pre_hook(one.note_input)

    def detach(self) -> None:
        """Remove them, also after an `attach` that was interrupted."""
        self.clean()
        for one in self.processors:
            remove_hooks(one.layer.block.norm1, one.note_input)
            if hasattr(one.layer.attn, MODULE):
                delattr(one.layer.attn, MODULE)

    def find_skipped(self, skipped: SkippedLayers) -> None:
        """Mark the layers and groups that a cached call skips."""
        for one in self.processors:
            one.skipped = skipped.holds(one.layer.block)
        for group in self.groups:
            group.skipped = all(one.skipped for one in self.processors if one.group is group)

    def enter(self, model: Module) -> None:
        """Start a call of the model; clear what an interrupted call left behind.

        Raises:
            RuntimeError: the backward of the previous call is still to come and would use this call's plans.
        """
        self._limit.lift()
        self._backward.enter(model, self.plans())

    def residual_on(self, latent: Tensor) -> ResidualSharing | None:
        """Return how residuals are shared at a latent's size."""
        if self._residual is None:
            return None
        group = self.groups[0]
        return self._residual.on_grid(math.prod(group.grid(latent)) * group.downsampling_factor**2)

    def begin(self, call: Call, residuals: Residuals | None, interpolate: bool = False) -> None:
        """Make the plans of a call, and put our processors into the layers.

        Args:
            call: the call that starts.
            residuals: residuals of attention, if they are shared.
            interpolate: whether the call is computed again, between the noise levels of known residuals.
        """
        cached, attention = not call.kind.full, call.kind.attention
        sharing = self.residual_on(call.latent) if attention == KEEP else None
        # If only cached calls use residuals, only the layers that these compute need one.
        for_cached = sharing is not None and sharing.interval == 1
        shared: Plans = {}
        for index, group in enumerate(self.groups):
            if not (group.skipped and (cached or for_cached)):
                self._plan(index, group, call, residuals, shared)
        for one in self.processors:
            _put_in(one, self._warn)
            one.attention = FULL if one.skipped and for_cached else attention
            one.residual = None  # an interrupted call may have left one
        if attention == SHARE and residuals is not None:
            residuals.give(call.sigma, interpolate, cached)
        if any(one.layer.block._compiled_call_impl is not None for one in self.processors):
            # Across steps, CUDA graphs may overwrite earlier outputs, which include our token maps.
            torch.compiler.cudagraph_mark_step_begin()
            self._limit.raise_for(len(self.groups))

    def _plan(self, index: int, group: Group, call: Call, residuals: Residuals | None, shared: Plans) -> None:
        """Make a group's plan of a call."""
        attention, latent = call.kind.attention, call.latent
        grid = group.grid(latent)
        group.tokens = math.prod(grid)
        group.images = latent.shape[0] * (frames_of(self._config, latent) if latent.ndim == 5 else 1)
        least = self._residual.least_tokens if self._residual else 0
        small = attention == KEEP and group.tokens * group.downsampling_factor**2 < least
        if attention in (SHARE, KEEP) and residuals is not None and residuals.stage == call.stage:
            group.plan = residuals.plans.get(index)
        elif attention == FULL or small:
            group.plan = None
        else:
            group.plan = group.make_plan(call, grid, shared)
            if attention == KEEP and group.plan is not None:
                group.plan.hold()

    def end(self, call: Call, residuals: Residuals | None, output: Any) -> str:
        """End a call: store residuals, let go of the rest; return which attention the layers computed.

        Args:
            call: the call that ends.
            residuals: residuals of attention, if they are shared.
            output: what the model returned; None if it raised.
        """
        ran = self._ran(call.kind)
        if call.kind.attention == KEEP and residuals is not None and output is not None:
            self._keep(call, residuals)
        self.leave(output)
        return ran

    def leave(self, output: Any) -> None:
        """Let go of all that the layers hold of a call, except what its backward needs."""
        self._let_go(raised=output is None)
        if (plans := self._backward.leave(output)) is not None:
            self._set_plans(plans)

    def _ran(self, kind: CallKind) -> str:
        if any(processor.attention == SHARE for processor in self.processors):
            return SHARE
        return OPERATOR if kind.attention == OPERATOR and any(self.plans()) else FULL

    def _keep(self, call: Call, residuals: Residuals) -> None:
        """Store the residuals of a call that computed both full attention and operators."""
        plans = {i: plan for i, plan in enumerate(self.plans()) if plan is not None}
        if any(one.compiled for one in self.processors):  # a CUDA graph overwrites its outputs
            for one in self.processors:
                one.residual = None if one.residual is None else one.residual.clone()
            plans = deepcopy(plans)
        residuals.keep(call.sigma, call.stage, plans)

    def plans(self) -> list[Plan | None]:
        """Return the current call's plans, one for each group."""
        return [group.plan for group in self.groups]

    def _set_plans(self, plans: list[Plan | None]) -> None:
        """Set each group's plan. For an empty list, remove them and restore the layers' own processors."""
        for i, group in enumerate(self.groups):
            group.plan = plans[i] if plans else None
        for one in self.processors if not plans else ():
            attn: Any = one.layer.block.attn1
            if getattr(attn, "processor", one) is one:  # diffusers deletes it before it sets a new one
                attn.set_processor(one.fallback)

    def suspend(self) -> list[AgentAttnProcessor]:
        """Restore the layers' own processors for a while; return what `resume` takes."""
        held = [one for one in self.processors if one.layer.attn.processor is one]
        for one in held:
            one.held = False
            one.layer.attn.set_processor(one.fallback)
        return held

    def resume(self, held: list[AgentAttnProcessor]) -> None:
        """Go on as before `suspend`."""
        for one in held:
            one.held = True
            one.layer.attn.set_processor(one)  # type: ignore[arg-type]

    def clean(self) -> None:
        """Restore the layers' own processors, however far a call had got."""
        self._let_go(raised=True)
        self._backward = PendingBackward()
        self._set_plans([])

    def _let_go(self, raised: bool) -> None:
        """Let go of all that the layers hold of a call, except their plans."""
        self._limit.lift()
        for one in self.processors:
            if not raised and (reason := _left_untouched(one)):
                self._warn(f"{one.layer.name} {reason}; it was left untouched")
            one.block_input, one.mismatch, one.beside = None, None, ""
            one.attention, one.residual = OPERATOR, None


def _put_in(one: AgentAttnProcessor, warn: WarnOnce) -> None:
    """Replace a layer's processor by ours if it computes plain attention."""
    attn: Any = one.layer.block.attn1
    own = attn.processor
    if own is one:  # a backward is still to come
        return
    one.held = own is one.fallback or is_plain(own)
    if one.held:
        one.fallback = own
        attn.set_processor(one)
    else:
        warn(f"{one.layer.name} now has a {type(own).__name__}; it is left untouched")


def _left_untouched(one: AgentAttnProcessor) -> str:
    """Return why a layer did not run its operator in a call; "" if it did."""
    if one.beside:
        return f"is given {one.beside}"
    if one.block_input is not None:
        return "was computed without its attention processor (T-GATE does so)"
    if one.mismatch is None:
        return ""
    images, tokens = one.mismatch
    return (
        f"got {tokens} tokens of {images} images where the latent's size gives "
        f"{one.group.tokens} of {one.group.images}"
    )


def _check_free(layer: AttentionLayer) -> None:
    if type(layer.block).__name__ == "ToMeBlock":
        raise ValueError(f"{layer.name} is patched by tomesd: call tomesd.remove_patch(pipe) first")
    processor = layer.attn.processor
    if not is_plain(processor):
        raise ValueError(
            f"{layer.name} has a {type(processor).__name__}, which agent attention would replace: "
            "set it to AttnProcessor2_0 first (unet.set_attn_processor), or leave this pipeline unpatched"
        )
