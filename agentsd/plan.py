"""What the layers of a group do in the model call under way: their phase, cells and one ranking."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from .config import AgentConfig
from .hosts import Site
from .matching import Partition, draw_cells, rank_tokens, split_grid
from .merging import Cut, cut_ranking
from .schedule import Step

# Most cells, and so agents, beyond exact mode: the stride grows with the grid, so time grows with the tokens.
MAX_AGENTS = 400

STOCK, TOME, AGENT = "stock", "tome", "agent"


class Cuts(NamedTuple):
    """The two cuts of one ranking: the tokens, or None to keep them all; the agents, or None to have none."""

    tokens: Cut | None
    agents: Cut | None


@dataclass
class Group:
    """Layers on one token grid that share a ranking: one layer in exact mode, else a whole level.

    Attributes:
        site: the group's first layer.
        index: number of the group; part of the key of its random cells.
        config: the settings.
        phase: STOCK, TOME or AGENT.
        tokens: how many tokens its layers are expected to get.
        partition: the split of its token grid in this call.
        cuts: made by the first of its layers that runs.
    """

    site: Site
    index: int
    config: AgentConfig
    phase: str = STOCK
    tokens: int = 0
    partition: Partition | None = None
    cuts: Cuts | None = None

    def begin(self, latent: Tensor, step: Step) -> None:
        """Set the phase and draw the cells for a call on `latent` (B, ..., H, W)."""
        config = self.config
        self.end()
        height, width = self.site.grid(latent)
        self.tokens = height * width
        stride = config.early_stride if step.early else config.late_stride
        if step.early and config.mode != "exact":
            stride = max(stride, math.ceil(math.sqrt(self.tokens / MAX_AGENTS)))
        if step.early:
            self.phase = AGENT
        elif config.late == "tome" and config.ratio > 0:
            self.phase = TOME
        if min(height, width) < stride:  # no whole cell
            self.phase = STOCK
        if self.phase != STOCK:
            random = config.cells == "random" or (config.cells == "auto" and latent.shape[0] % 2 == 0)
            key = (config.seed, self.index, step.timestep) if random else None
            split = split_grid(height, width, stride, draw_cells(height, width, stride, key))
            self.partition = Partition(*(index.to(latent.device) for index in split))

    def cut(self, block_input: Tensor) -> Cuts:
        """Rank the tokens (B, N, C) of a block's input and cut the ranking for tokens and agents."""
        config, partition = self.config, self.partition
        assert partition is not None
        n_tokens = block_input.shape[1]
        ranking = rank_tokens(block_input, partition)
        n_merged = min(int(n_tokens * config.ratio), partition.src.numel())
        n_agents = partition.dst.numel()
        if config.mode == "exact":
            n_agents = max(n_tokens - int(n_tokens * config.agent_ratio), n_agents)
        # As the reference: where agents would be no fewer than half the tokens, attention stays plain.
        few = self.phase == AGENT and 2 * n_agents < n_tokens - n_merged
        return Cuts(
            tokens=cut_ranking(ranking, n_merged) if n_merged else None,
            agents=cut_ranking(ranking, n_tokens - n_agents) if few else None,
        )

    def end(self) -> None:
        """Let go of all that belongs to a call."""
        self.phase, self.partition, self.cuts = STOCK, None, None
