"""Agent attention whose agents are found by token merging (AgentSD, "Agent Attention", ECCV 2024, Eq. 9)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from diffusers.models.attention_processor import Attention
from torch import Tensor

from ..checks import check, check_share
from .formula import agent_attention
from .matching import Ranking
from .merging import Cut, cut_ranking, first_of, merge, of_last, second_of, together, unmerge
from .operator import Attend, Operator, Place, heads, project, project_out
from .ranking import RankedPlan, check_cells, partition

_LARGEST_K = 1000.0  # half precision ends at 65,504


def check_formula(k: float, scale: float) -> None:
    """Raise ValueError for a bad weight of the residual or exponent of the head width."""
    check("k", k, 0 <= k <= _LARGEST_K, f"pass 0 to {_LARGEST_K:g}, for instance 0.075")
    way_out = "it is the exponent of the head width: pass -0.15 (the paper) or any value of 0 or less"
    check("scale", scale, scale <= 0, way_out)


@dataclass(frozen=True)
class Agents(Operator):
    """Tokens are merged by `ratio`, and the same ranking is cut further for the agents.

    Attributes:
        ratio: share of the tokens merged away before attention, in [0, 1).
        k: weight of the `+ kV` residual, 0 or more.
        scale: exponent of the head width `d` in the broadcast softmax, `d**scale`; 0 or less. The usual
            attention scale is -0.5, the paper's is -0.15.
        stride: side of the cells that hold one destination token, and so one agent, each.
        at_most: the stride grows where there would be more agents; None never lets it.
        agent_ratio: share of the tokens merged away to make the agents, in (0, 1); at least the destination
            tokens stay, which are all that stay with None.
        ranking: "level": one for all layers of a level, or "layer": each its own, as in the paper.
        cells: the destination token of each cell: "random", "first" (top left), or "auto": random for an
            even batch and first for an odd one, as ToMeSD does.
        feed_forward: the block's feed-forward layer runs on the merged tokens too.
    """

    name: ClassVar[str] = "agents"

    ratio: float = 0.4
    k: float = 0.075
    scale: float = -0.15
    stride: int = 4
    at_most: int | None = 400
    agent_ratio: float | None = None
    ranking: str = "level"
    cells: str = "auto"
    feed_forward: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share("ratio", self.ratio, below_one=True)
        check_formula(self.k, self.scale)
        check_cells(self.cells, self.stride, self.at_most)
        check_ranking(self.ranking)
        ok = self.agent_ratio is None or 0 < self.agent_ratio < 1
        check("agent_ratio", self.agent_ratio, ok, "pass a share in (0, 1), like 0.95, or None")
        alone = not (self.feed_forward and self.ranking == "layer")
        check("feed_forward", self.feed_forward, alone, "it needs ranking='level', which outlives a layer")

    @property
    def own_ranking(self) -> bool:
        """Whether each layer ranks its own tokens."""
        return self.ranking == "layer"

    def plan(self, place: Place) -> AgentsPlan | None:
        """Draw the cells; None where not one is whole."""
        stride = place.stride(self.stride, self.at_most)
        if min(place.grid) < stride:
            return None
        return AgentsPlan(self, partition(place, stride, self.cells), self.ratio, self.own_ranking)


def check_ranking(ranking: str) -> None:
    """Raise ValueError unless it is whose ranking is."""
    check("ranking", ranking, ranking in ("level", "layer"), "choose 'level' or 'layer'")


class AgentsPlan(RankedPlan):
    """Merged tokens, and agents from the same ranking; plain attention where agents would not be few."""

    both: Cut | None = None
    """The cut of the tokens, where they are merged, and then that of the agents."""

    def __init__(self, settings: Agents, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.settings = settings

    @property
    def agents(self) -> Cut | None:
        """How tokens are merged into agents; None where attention is plain."""
        if self.both is None or self.tokens is None:
            return self.both
        return second_of(self.both, self.tokens.edges.numel() - 1)

    def cut(self, ranking: Ranking, block_input: Tensor, n_merged: int) -> None:
        """Cut the ranking for the tokens and for the agents."""
        settings, (batch, n_tokens, _), dtype = self.settings, block_input.shape, block_input.dtype
        n_agents = self.drawn.dst.numel()
        if settings.agent_ratio is not None:
            n_agents = max(n_tokens - int(n_tokens * settings.agent_ratio), n_agents)
        # As the reference: where agents would be no fewer than half the tokens, attention stays plain.
        few = 2 * n_agents < n_tokens - n_merged
        if not few:
            super().cut(ranking, block_input, n_merged)
        elif n_merged:
            self.both = cut_ranking(ranking, n_merged, dtype, n_tokens - n_agents)
            self.tokens = first_of(self.both, batch * (n_tokens - n_merged))
        else:
            self.both = cut_ranking(ranking, n_tokens - n_agents, dtype)
        if settings.feed_forward:
            self.feed_forward = self.tokens

    def of_last(self, batch: int, images: int) -> AgentsPlan:
        """The same cuts for the last images of a batch."""
        plan = super().of_last(batch, images)
        assert isinstance(plan, AgentsPlan)
        if self.agents is not None:
            plan.both = of_last(self.agents, batch, images)
            if plan.tokens is not None:
                plan.both = together(plan.tokens, plan.both)
        return plan

    def forget(self) -> None:
        """Let go of the agents' cut as well."""
        super().forget()
        if self.own:
            self.both = None

    def attend(self, attn: Attention, tokens: Tensor, wrapped: Attend) -> Tensor:
        """Merge, gather and broadcast, unmerge."""
        cut, both, settings = self.tokens, self.both, self.settings
        if both is None:
            out = wrapped(tokens if cut is None else merge(tokens, cut))
        elif cut is None:
            out = attend_agents(attn, tokens, merge(tokens, both), settings.k, settings.scale)
        else:
            merged, batch = merge(tokens, both), tokens.shape[0]
            parts = merged[0].tensor_split([cut.edges.numel() - 1])
            tokens, agents = (part.unflatten(0, (batch, -1)) for part in parts)
            out = attend_agents(attn, tokens, agents, settings.k, settings.scale, both=merged)
        self.forget()
        return out if cut is None else unmerge(out, cut)


def attend_agents(
    attn: Attention,
    tokens: Tensor,
    agents: Tensor,
    k: float,
    scale: float,
    mask: Tensor | None = None,
    both: Tensor | None = None,
) -> Tensor:
    """The layer's own projections and norms around `agent_attention`: (B, M, C) -> (B, M, C).

    Agents (B, n, C) are projected as queries; in one pass with the tokens where they stand side by side,
    `both` (1, B * M + B * n, C).
    """
    if both is None:
        query, agent = attn.to_q(tokens), attn.to_q(agents)
    else:
        batch, n_tokens, _ = tokens.shape
        parts = attn.to_q(both)[0].tensor_split([batch * n_tokens])
        query, agent = (part.unflatten(0, (batch, -1)) for part in parts)
    query, key, value = project(attn, tokens, query)
    agent = heads(attn, agent)
    if attn.norm_q is not None:
        agent = attn.norm_q(agent)
    dtype = value.dtype
    if attn.upcast_attention or attn.upcast_softmax:
        query, key, value, agent = (x.float() for x in (query, key, value, agent))
    out = agent_attention(query, key, value, agent, k, scale, mask)
    return project_out(attn, out.to(dtype))
