"""The patched layers: those that share a plan, and what they all run in a call."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .attention import Operator, PooledAgents
from .attention.operator import GridContext, Plan
from .attention.processor import AgentAttnProcessor, LayerState, Work, is_ours
from .attention.residual import FULL, KEEP, PLAIN, SHARE
from .cache.skip_layers import SkippedLayers
from .context import StepContext
from .hosts.models import AttentionLayer, is_plain


@dataclass
class Group:
    """Layers on one token grid that share a plan: a whole level, or one layer that makes its own.

    Attributes:
        site: the group's first layer.
        index: its number; part of the key of its random cells.
        stages: what it runs in each stage of a run.
        downsampling_factor: side of its tokens, in tokens of the finest patched level.
        seed: of the random cells.
        deep: a cached step skips all of its layers.
        work: of the call under way.
    """

    site: AttentionLayer
    index: int
    stages: tuple[Operator | None, ...]
    downsampling_factor: int
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
        place = GridContext(grid, self.downsampling_factor, len(each), latent.device, key, half)
        self.work.grid = grid
        operator = each[0]
        if len(set(each)) > 1 and isinstance(operator, PooledAgents):
            every = [stage for stage in self.stages if isinstance(stage, PooledAgents)]
            self.work.plan = operator.plan_each(place, each, every)  # type: ignore[arg-type]
        else:
            self.work.plan = None if operator is None else operator.plan(place)


class PatchedLayers:
    """Plans what the patched layers run in a call, holds them, and lets go of what they held.

    Args:
        sites: where the layers are.
        states: what each knows.
        groups: those that share a plan.
        least_tokens: of the finest level, below which residuals are not shared.
        warn: tells the user something, once.
    """

    def __init__(
        self,
        sites: list[AttentionLayer],
        states: list[LayerState],
        groups: list[Group],
        least_tokens: int,
        warn: Callable[[str], None],
    ) -> None:
        self._sites, self.states, self._groups = sites, states, groups
        self._least_tokens, self._warn = least_tokens, warn
        self._skipped: list[bool] = [False] * len(states)
        self._limits: ExitStack | None = None  # what is set for the call under way

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_limits": None}

    def find_skipped(self, skipped: SkippedLayers) -> None:
        """Note the layers, and the groups, that a cached step skips."""
        self._skipped = [skipped.holds(site.block) for site in self._sites]
        for group in self._groups:
            own = [
                gone
                for gone, state in zip(self._skipped, self.states, strict=True)
                if state.work is group.work
            ]
            group.deep = all(own)

    def plan(self, context: StepContext, between: bool = False) -> None:
        """Make the plans of a call, and hold its layers.

        Args:
            context: of the call.
            between: it is computed again, at a noise level between those that residuals are known at.
        """
        computed, attention = context.kind.computed, context.kind.attention
        for index, group in enumerate(self._groups):
            if computed or not group.deep:
                self._plan_group(index, group, context)
        for site, state in zip(self._sites, self.states, strict=True):
            state.held = self.claim(site.attn, state)
            state.attention, state.residual = attention, None
        entry = context.entry
        if attention == SHARE and entry is not None and entry.residuals is not None:
            run = [computed or not gone for gone in self._skipped]
            entry.residuals.give(context.sigma, len(context.stages), between, run)
        if any(group.site.block._compiled_call_impl is not None for group in self._groups):
            # Blocks that are compiled one by one run the same code, and each kind of block is a recompilation
            # of it: of a group the one that ranks and the others, in either phase.
            limit = torch._dynamo.config.recompile_limit + 4 * len(self._groups)
            self._limits = ExitStack()
            self._limits.enter_context(torch._dynamo.config.patch(recompile_limit=limit))

    def _plan_group(self, index: int, group: Group, context: StepContext) -> None:
        attention, stages = context.kind.attention, context.stages
        residuals = None if context.entry is None else context.entry.residuals
        if residuals is not None and attention in (SHARE, KEEP) and residuals.fit(stages):
            group.work.grid = group.site.grid(context.latent)
            group.work.plan = residuals.plan_of(index, len(stages))
        elif attention == FULL or self._is_small(group, context):
            group.work.plan = None
        else:
            group.begin(context.latent, context.timestep, stages)
            if attention == KEEP and group.work.plan is not None:
                group.work.plan.hold()

    def _is_small(self, group: Group, context: StepContext) -> bool:
        """Whether the grid is too small for residuals to be shared."""
        tokens = math.prod(group.site.grid(context.latent)) * group.downsampling_factor**2
        return context.kind.attention == KEEP and tokens < self._least_tokens

    @property
    def share(self) -> bool:
        """Whether any adds a residual in the call under way."""
        return any(state.attention == SHARE for state in self.states)

    def keep_residuals(self, context: StepContext) -> None:
        """Keep what the layers found, where the call that ends computed full attention and operators."""
        entry = context.entry
        if context.kind.attention == KEEP and entry is not None and entry.residuals is not None:
            plans = {i: plan for i, group in enumerate(self._groups) if (plan := group.work.plan) is not None}
            entry.residuals.keep(context.sigma, context.stages, plans)

    def plans(self) -> list[Plan | None]:
        """Those of the call under way, one a group."""
        return [group.work.plan for group in self._groups]

    def set_plans(self, plans: list[Plan | None]) -> None:
        """Put plans in their place; none where the list is empty."""
        for i, group in enumerate(self._groups):
            group.work.plan = plans[i] if plans else None

    def lift_limits(self) -> None:
        """Set nothing any more for a call."""
        if self._limits is not None:
            self._limits.close()
            self._limits = None

    def let_go(self, raised: bool) -> None:
        """Forget what the layers hold of a call that ends, but their plans."""
        self.lift_limits()
        for state in self.states:
            if state.block_input is not None and not raised:
                self._warn(
                    f"agentsd: {state.name} was computed without its attention processor (T-GATE does so); "
                    "it was left untouched"
                )
            if state.mismatch:
                self._warn(
                    f"agentsd: {state.name} got {state.mismatch} tokens where the latent's size gives "
                    f"{state.work.tokens}; it was left untouched"
                )
            state.block_input, state.mismatch = None, 0
            state.attention, state.residual = PLAIN, None

    def claim(self, attn: Any, state: LayerState) -> bool:
        """Hold a layer, also where the host has since put a plain processor there."""
        if not is_ours(attn.processor):
            if not is_plain(attn.processor):
                kind = type(attn.processor).__name__
                self._warn(f"agentsd: {state.name} now has a {kind}; it is left untouched")
                return False
            attn.set_processor(AgentAttnProcessor(attn.processor))
        return True
