"""What agents and later keys on two levels do otherwise than the paper's mode."""

from dataclasses import replace

import pytest
import torch
from recipes import AGENTS_THEN_KEYS, TODO
from tiny import call, make_unet, may_skip

from agentsd import Agents, Downsample, Merge, Phases, Recipe, apply_agentsd
from agentsd.attention.matching import rank_tokens
from agentsd.attention.merging import merge
from agentsd.attention.operator import GridContext
from agentsd.recipe import AGENTSD


def test_tokens_are_ranked_once_for_each_level_and_call(monkeypatch):
    import agentsd.attention.ranking as ranking

    ranked = []

    def spy(metric, partition):
        ranked.append(metric.shape[1])
        return rank_tokens(metric, partition)

    monkeypatch.setattr(ranking, "rank_tokens", spy)
    unet = make_unet()
    paper = apply_agentsd(unet, recipe=replace(AGENTSD, levels=2))
    call(unet)
    assert sorted(ranked) == [64] * 3 + [256] * 3
    ranked.clear()
    both = apply_agentsd(unet, recipe=AGENTS_THEN_KEYS)
    assert both.layer_names == paper.layer_names
    call(unet)
    assert sorted(ranked) == [64, 256]
    call(unet, 1)
    assert sorted(ranked) == [64, 256]  # nothing is ranked in later steps, which downsample
    apply_agentsd(unet, recipe=Recipe(Phases(Agents(), Merge())))
    call(unet, 1)
    assert sorted(ranked) == [64, 64, 256, 256]


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
