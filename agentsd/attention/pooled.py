"""Agent attention whose agents are averages over the grid of queries.

As in "Agent Attention" (ECCV 2024), Eq. 6, and, with the defaults, as the mediators of "Efficient Diffusion
Transformer with Step-wise Dynamic Attention Mediators" (ECCV 2024), Eq. 7 to 9.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from diffusers.models.attention_processor import Attention
from torch import Tensor

from ..checks import check
from .agents import attend_agents, check_formula
from .matching import Partition
from .merging import merge, unmerge
from .operator import Attend, GridContext
from .pooling import Pool, agent_grid, pool_tokens
from .ranking import RankedOperator, RankedPlan


@dataclass(frozen=True)
class PooledAgents(RankedOperator):
    """Agents pooled from the queries, on all tokens or on merged ones.

    Attributes:
        count: how many agents, at most; None takes one for each cell.
        ratio: share of the tokens merged away before attention, 0 to 1 - 1 / stride**2.
        k, scale, stride, at_most, ranking, destinations: see `Agents`, whose `k` and `scale` (AgentSD's) are
            others; the last two are of the merging.
    """

    name: ClassVar[str] = "pooled_agents"

    count: int | None = None
    ratio: float = 0.0
    k: float = 0.0
    scale: float = -0.5
    stride: int = 4
    at_most: int | None = 400
    ranking: str = "level"
    destinations: str = "random"

    def __post_init__(self) -> None:
        super().__post_init__()
        check("count", self.count, self.count is None or self.count >= 1, "pass 1 or more, or None")
        check_formula(self.k, self.scale)
        plain = self.ratio > 0 or (self.ranking, self.destinations) == ("level", "random")
        check("ratio", self.ratio, plain, "ranking and destinations are of merged tokens: pass more than 0")

    def plan(self, context: GridContext) -> PooledPlan | None:
        """Plan the pooling; None where no cell is whole."""
        stride = context.stride(self.stride, self.at_most)
        if min(context.grid) < stride:
            return None
        height, width = context.grid
        count = self.count or (height // stride) * (width // stride)
        kept = context.tokens - int(context.tokens * self.ratio)
        pool = None
        if 2 * count < kept:  # as the reference: else attention stays plain
            pool = Pool(height, width, *agent_grid(count, height, width))
        partition = self.sample_partition(context, stride) if self.ratio else None
        return PooledPlan(self, pool, partition) if partition or pool else None


class PooledPlan(RankedPlan):
    """Merged tokens, if any are, and pooled agents, if they are few."""

    def __init__(self, settings: PooledAgents, pool: Pool | None, partition: Partition | None) -> None:
        super().__init__(partition, settings.ratio, settings.own_ranking)  # type: ignore[arg-type]
        self.settings, self.pool = settings, pool
        self.ranks = partition is not None

    def attend(self, attn: Attention, tokens: Tensor, fallback: Attend) -> Tensor:
        """Merge, gather and broadcast, unmerge."""
        merge_map = self.maps
        merged = tokens if merge_map is None else merge(tokens, merge_map)
        if self.pool is None:
            out = fallback(merged)
        else:
            # Averages of tokens, projected, are averages of queries.
            agents = pool_tokens(tokens, self.pool)
            k, scale = self.settings.k, self.settings.scale
            out = attend_agents(attn, merged, agents, k, scale)
        if merge_map is None:
            return out
        self.forget()
        return unmerge(out, merge_map)
