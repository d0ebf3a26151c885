"""What agents and later keys on two levels do otherwise than the paper's mode."""

from dataclasses import replace

import pytest
import torch
from recipes import AGENTS_THEN_KEYS, TODO
from tiny import call, make_unet, may_skip

from agentsd import Agents, Downsample, Merge, Phases, Recipe, apply_agentsd
from agentsd.attention import ranking
from agentsd.attention.merging import merge
from agentsd.attention.operator import GridContext
from agentsd.recipe import AGENTSD

BY_LEVEL, BY_LAYER = [64, 256], [64] * 3 + [256] * 3
"""The tokens of each ranking of a call: of two levels, and of their six layers."""


@pytest.mark.parametrize(
    ("phases", "early", "late"),
    [
        (replace(AGENTSD, levels=2).attention, BY_LAYER, BY_LAYER),
        (Phases(Agents(), Downsample()), BY_LEVEL, []),
        (Phases(Agents(), Merge()), BY_LEVEL, BY_LEVEL),
        (Phases(Agents(), Merge(ranking="layer")), BY_LEVEL, BY_LAYER),
        (Phases(Agents(ranking="layer"), Merge()), BY_LAYER, BY_LEVEL),
    ],
)
def test_each_phase_ranks_as_it_says(monkeypatch, phases, early, late):
    """Once for each level and call or in each of the layers, whichever stands beside it."""
    ranked, rank = [], ranking.rank_tokens
    monkeypatch.setattr(ranking, "rank_tokens", lambda m, *rest: ranked.append(m.shape[1]) or rank(m, *rest))
    apply_agentsd(unet := make_unet(), recipe=Recipe(phases, levels=2))
    for t, expected in ((999, early), (1, late)):
        ranked.clear()
        call(unet, t)
        assert sorted(ranked) == expected


def test_a_stage_is_the_same_whatever_ranks_in_the_other():
    outputs = []
    for late in (Merge(), Merge(ranking="layer")):
        apply_agentsd(unet := make_unet(), recipe=Recipe(Phases(Agents(), late)))
        outputs.append(call(unet))
    assert torch.equal(*outputs)


def test_the_first_layer_is_the_papers():
    seen = {}
    for name, recipe in (("paper", AGENTSD), ("agents, then keys", replace(AGENTS_THEN_KEYS, levels=1))):
        unet = make_unet()
        apply_agentsd(unet, recipe=recipe)
        attn = unet.down_blocks[0].attentions[0].transformer_blocks[0].attn1
        attn.register_forward_hook(may_skip(lambda m, args, out, name=name: seen.__setitem__(name, out)))
        call(unet)
    assert torch.equal(seen["paper"], seen["agents, then keys"])


def test_a_recipe_takes_the_levels_there_are():
    one_level = make_unet(
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D", "CrossAttnUpBlock2D"),
        mid_block_type=None,
    )
    assert len(apply_agentsd(one_level, recipe=AGENTS_THEN_KEYS).layer_names) == 3
    with pytest.raises(ValueError, match="levels=2"):
        apply_agentsd(one_level, recipe=replace(AGENTS_THEN_KEYS, levels=2))


@pytest.mark.parametrize(
    ("side", "agents"), [(16, 4 * 4), (64, 16 * 16), (65, 16 * 16), (96, 19 * 19), (256, 19 * 19)]
)
def test_agents_are_bounded(side, agents):
    plan = Agents().plan(GridContext((side, side), 1, "cpu", (0, 0, 999.0)))
    assert plan.partition.dst.numel() == agents
    tokens = torch.randn(1, side * side, 2, generator=torch.Generator().manual_seed(0))
    plan.rank(tokens)
    assert merge(tokens, plan.maps.agents).shape == (1, agents, 2)


def test_the_papers_mode_bounds_no_agents():
    early, late = AGENTSD.attention.stages
    for operator, strides in ((early, 4), (late, 2)):
        plan = operator.plan(GridContext((96, 96), 1, "cpu", (0, 0, 999.0)))
        assert plan.partition.dst.numel() == (96 // strides) ** 2


def test_an_operator_alone_runs_in_every_step():
    unet = make_unet()
    with apply_agentsd(unet, recipe=Recipe(Phases(None, Downsample(), early_frac=0))):
        later = [call(unet, t) for t in (999, 1)]
    apply_agentsd(unet, recipe=TODO)
    for t, expected in zip((999, 1), later, strict=True):
        assert torch.equal(call(unet, t), expected)
