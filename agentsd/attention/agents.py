"""Agent attention whose agents are found by token merging (AgentSD, "Agent Attention", ECCV 2024, Eq. 9)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from diffusers.models.attention_processor import Attention
from torch import Tensor

from ..checks import check
from .formula import agent_attention
from .matching import Ranking
from .merging import MergeMap, join, make_merge_map, merge, merge_rows, unmerge
from .operator import Attend, GridContext, heads, project, project_out
from .ranking import RankedOperator, RankedPlan

_LARGEST_K = 1000.0  # half precision ends at 65,504


def check_formula(k: float, scale: float) -> None:
    """Raise ValueError for a bad weight of the residual or exponent of the head width."""
    check("k", k, 0 <= k <= _LARGEST_K, f"pass 0 to {_LARGEST_K:g}, for instance 0.075")
    way_out = "it is the exponent of the head width: pass -0.15 (the paper) or any value of 0 or less"
    check("scale", scale, scale <= 0, way_out)


@dataclass(frozen=True)
class Agents(RankedOperator):
    """Tokens are merged by `ratio`, and by the same ranking further for the agents.

    Attributes:
        ratio: share of the tokens merged away before attention, 0 to 1 - 1 / stride**2.
        k: weight of the `+ kV` residual, 0 or more.
        scale: exponent of the head width `d` in the broadcast softmax, `d**scale`; 0 or less. The usual
            attention scale is -0.5, the paper's is -0.15.
        stride: side of the cells that hold one destination token, and so one agent, each.
        at_most: the stride grows where there would be more agents; None never lets it.
        agent_ratio: share of the tokens merged away to make the agents, in (0, 1); at least the destination
            tokens stay, which are all that stay with None.
        ranking: "level": one for all layers of a level, or "layer": each its own, as in the paper.
        destinations: which token of each cell: "random", or "first" (top left).
    """

    name: ClassVar[str] = "agents"

    ratio: float = 0.4
    k: float = 0.075
    scale: float = -0.15
    stride: int = 4
    at_most: int | None = 400
    agent_ratio: float | None = None
    ranking: str = "level"
    destinations: str = "random"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_formula(self.k, self.scale)
        ok = self.agent_ratio is None or 0 < self.agent_ratio < 1
        check("agent_ratio", self.agent_ratio, ok, "pass a share in (0, 1), like 0.95, or None")

    def plan(self, context: GridContext) -> AgentsPlan | None:
        """Sample the destinations; None where no cell is whole."""
        stride = context.stride(self.stride, self.at_most)
        if min(context.grid) < stride:
            return None
        return AgentsPlan(self, self.sample_partition(context, stride), self.ratio, self.own_ranking)


class Maps(NamedTuple):
    """How the tokens of a layer are merged.

    Attributes:
        tokens: into fewer tokens; None where they are not.
        agents: into agents; None where attention is plain.
        joined: both as one map, for a single pass over the tokens, where both are.
    """

    tokens: MergeMap | None
    agents: MergeMap | None = None
    joined: MergeMap | None = None


class AgentsPlan(RankedPlan):
    """Merged tokens, and agents from the same ranking; plain attention where agents would not be few."""

    def __init__(self, settings: Agents, *args: Any) -> None:
        super().__init__(*args)
        self.settings = settings

    def make_maps(self, ranking: Ranking, block_input: Tensor, n_merged: int) -> Maps:
        """The merge maps of the tokens and of the agents."""
        tokens = super().make_maps(ranking, block_input, n_merged)
        n_tokens, n_agents = block_input.shape[1], self.partition.targets
        if self.settings.agent_ratio is not None:
            n_agents = max(n_tokens - int(n_tokens * self.settings.agent_ratio), n_agents)
        if 2 * n_agents >= n_tokens - n_merged:  # as the reference: attention stays plain
            return Maps(tokens)
        agents = make_merge_map(ranking, n_tokens - n_agents, block_input.dtype)
        if tokens is None:
            return Maps(None, agents)
        joined, tokens, agents = join(tokens, agents)
        return Maps(tokens, agents, joined)

    def attend(self, attn: Attention, tokens: Tensor, fallback: Attend) -> Tensor:
        """Merge, gather and broadcast, unmerge."""
        maps, k, scale = self.maps, self.settings.k, self.settings.scale
        if maps.agents is None:
            out = fallback(tokens if maps.tokens is None else merge(tokens, maps.tokens))
        elif maps.joined is None:
            out = attend_agents(attn, tokens, merge(tokens, maps.agents), k, scale)
        else:
            rows, batch = merge_rows(tokens, maps.joined), tokens.shape[0]
            parts = rows.tensor_split([maps.tokens.offsets.numel() - 1])
            merged, agents = (part.unflatten(0, (batch, -1)) for part in parts)
            out = attend_agents(attn, merged, agents, k, scale, rows=rows)
        self.forget()
        return out if maps.tokens is None else unmerge(out, maps.tokens)


def attend_agents(
    attn: Attention,
    tokens: Tensor,
    agents: Tensor,
    k: float,
    scale: float,
    rows: Tensor | None = None,
) -> Tensor:
    """The layer's own projections and norms around `agent_attention`: (B, M, C) -> (B, M, C).

    Agents (B, n, C) are projected as queries; in one pass with the tokens where `rows` (B * M + B * n, C)
    holds both.
    """
    if rows is None:
        query, agent = attn.to_q(tokens), attn.to_q(agents)
    else:
        batch, n_tokens, _ = tokens.shape
        parts = attn.to_q(rows).tensor_split([batch * n_tokens])
        query, agent = (part.unflatten(0, (batch, -1)) for part in parts)
    query, key, value = project(attn, tokens, query)
    agent = heads(attn, agent)
    if attn.norm_q is not None:
        agent = attn.norm_q(agent)
    dtype = value.dtype
    if attn.upcast_attention or attn.upcast_softmax:
        query, key, value, agent = (x.float() for x in (query, key, value, agent))
    out = agent_attention(query, key, value, agent, k, scale)
    return project_out(attn, out.to(dtype))
