"""What the layers of a group do in the model call under way: their phase, cells and one ranking."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from .config import AgentConfig
from .hosts import Site
from .matching import Partition, draw_cells, rank_tokens, split_grid
from .merging import Cut, cut_ranking
from .pooling import Pool, make_pool

# Beyond exact mode strides grow with the grid, so that time grows with the tokens and not their square:
# at most so many cells, and so agents, and at most so many downsampled keys and values (48 x 48) at the
# finest level; half as many at the second, where each is twice as wide.
MAX_AGENTS = 400
MAX_KEYS = 2304

STOCK, TOME, DOWNSAMPLE, AGENT = "stock", "tome", "downsample", "agent"


class Cuts(NamedTuple):
    """Cuts of one ranking: the tokens, or None to keep them all; the agents, or None to merge to none."""

    tokens: Cut | None
    agents: Cut | None


@dataclass
class Group:
    """Layers on one token grid that share a ranking: one layer in exact mode, else a whole level.

    Attributes:
        site: the group's first layer.
        index: number of the group; part of the key of its random cells.
        config: the settings.
        coarseness: side of its tokens, in tokens of the finest patched level.
        phase: STOCK, TOME, DOWNSAMPLE or AGENT.
        ratio: share of the tokens merged away in this call.
        grid: height and width in tokens that its layers are expected to get.
        partition: the split of that grid in this call, where tokens are ranked.
        cuts: made by the first of its layers that runs.
        pool: how agents are pooled, where they are.
        kept: (n,) positions of the tokens that give keys and values, in DOWNSAMPLE.
    """

    site: Site
    index: int
    config: AgentConfig
    coarseness: int = 1
    phase: str = STOCK
    ratio: float = 0.0
    grid: tuple[int, int] = (0, 0)
    partition: Partition | None = None
    cuts: Cuts | None = None
    pool: Pool | None = None
    kept: Tensor | None = None

    @property
    def tokens(self) -> int:
        """How many tokens its layers are expected to get."""
        return self.grid[0] * self.grid[1]

    def begin(self, latent: Tensor, timestep: float, agents: Sequence[int] | None) -> None:
        """Set the phase and draw the cells for a call.

        Args:
            latent: (B, ..., H, W) what the model is called on.
            timestep: the noise level; part of the key of the random cells.
            agents: for each image how many agents it gets, at most; 0 takes the settings' own number. None
                in a later step.
        """
        config = self.config
        self.end()
        self.grid = self.site.grid(latent)
        late = agents is None
        does = config.does_late if late else config.early
        own = 0 if config.schedule == "distance" else sum(config.agent_counts)  # one number, or none
        agents = [count or own for count in agents or (0,) * latent.shape[0]]
        self.ratio = config.late_ratio if late and config.late_ratio is not None else config.ratio
        if does == "agent":
            self.phase = AGENT
        elif does == "tome" and self.ratio > 0:
            self.phase = TOME
        elif does == "downsample":
            self.phase = DOWNSAMPLE
        stride = self._stride(max(agents))
        if self.phase == STOCK or min(self.grid) < stride:  # no whole cell
            self.phase = STOCK
            return
        if self.phase == AGENT and config.attention != "agent":
            self.cuts = Cuts(None, None)
            return
        if self.phase == AGENT and config.agents == "pool":
            self._plan_pool(latent, agents, stride)
            if self.ratio == 0:
                self.cuts = Cuts(None, None)
                return
        if self.phase == DOWNSAMPLE:  # the same in every step: drawn anew, they would give pictures a grain
            self.kept, self.cuts = self._split(stride, None, latent.device).dst, Cuts(None, None)
            return
        random = config.cells == "random" or (config.cells == "auto" and latent.shape[0] % 2 == 0)
        key = (config.seed, self.index, timestep) if random else None
        self.partition = self._split(stride, key, latent.device)

    def _stride(self, agents: int) -> int:
        """The side of the cells in this phase: the setting's, or one that makes as many as the agents."""
        config = self.config
        if self.phase != AGENT:
            stride = config.late_stride
        elif agents and config.agents == "merge":
            stride = self._stride_of(agents)
        else:
            stride = config.early_stride
        bound = {AGENT: MAX_AGENTS, DOWNSAMPLE: MAX_KEYS // self.coarseness}.get(self.phase)
        if config.mode != "exact" and bound:
            stride = max(stride, self._stride_of(bound))
        return stride

    def _stride_of(self, cells: int) -> int:
        """The least stride, 2 or more, that makes at most so many cells."""
        return max(2, math.ceil(math.sqrt(self.tokens / cells)))

    def _split(self, stride: int, key: tuple[int, int, float] | None, device: Any) -> Partition:
        split = split_grid(*self.grid, stride, draw_cells(*self.grid, stride, key))
        return Partition(*(index.to(device) for index in split))

    def _plan_pool(self, latent: Tensor, agents: Sequence[int], stride: int) -> None:
        """Plan the pooling, unless agents would be no fewer than half the tokens (see `cut`)."""
        cells = math.prod(size // stride for size in self.grid)
        wanted = [count or cells for count in agents]
        kept = self.tokens - int(self.tokens * self.ratio)
        if 2 * max(wanted) < kept:
            counts = self.config.agent_counts or (cells,)
            self.pool = make_pool(*self.grid, counts, wanted, latent.device)

    def cut(self, block_input: Tensor) -> Cuts:
        """Rank the tokens (B, N, C) of a block's input and cut the ranking for tokens and agents."""
        config, partition = self.config, self.partition
        assert partition is not None
        n_tokens = block_input.shape[1]
        ranking = rank_tokens(block_input, partition)
        n_merged = min(int(n_tokens * self.ratio), partition.src.numel())
        n_agents = partition.dst.numel()
        if config.mode == "exact" and not config.agent_counts:
            n_agents = max(n_tokens - int(n_tokens * config.agent_ratio), n_agents)
        # As the reference: where agents would be no fewer than half the tokens, attention stays plain.
        few = self.phase == AGENT and config.agents == "merge" and 2 * n_agents < n_tokens - n_merged
        return Cuts(
            tokens=cut_ranking(ranking, n_merged) if n_merged else None,
            agents=cut_ranking(ranking, n_tokens - n_agents) if few else None,
        )

    def end(self) -> None:
        """Let go of all that belongs to a call."""
        self.phase, self.partition, self.cuts, self.pool, self.kept = STOCK, None, None, None, None
