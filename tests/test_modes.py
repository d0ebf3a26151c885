"""What agents and later keys on two levels do otherwise than the paper's mode."""

from dataclasses import replace

import pytest
import torch
from recipes import AGENTS_THEN_KEYS, MERGED_FEED_FORWARD, TODO
from tiny import call, make_unet

from agentsd import Agents, Downsample, Merge, Phases, Recipe, apply_agentsd
from agentsd.attention.matching import draw_cells, rank_tokens, split_grid
from agentsd.attention.merging import cut_ranking, merge, unmerge
from agentsd.attention.operator import Place
from agentsd.recipe import PAPER


def test_tokens_are_ranked_once_for_each_level_and_call(monkeypatch):
    import agentsd.attention.ranking as ranking

    ranked = []

    def spy(metric, partition):
        ranked.append(metric.shape[1])
        return rank_tokens(metric, partition)

    monkeypatch.setattr(ranking, "rank_tokens", spy)
    unet = make_unet()
    paper = apply_agentsd(unet, recipe=replace(PAPER, levels=2))
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
    for name, recipe in (("paper", PAPER), ("agents, then keys", replace(AGENTS_THEN_KEYS, levels=1))):
        unet = make_unet()
        apply_agentsd(unet, recipe=recipe)
        attn = unet.down_blocks[0].attentions[0].transformer_blocks[0].attn1
        attn.register_forward_hook(lambda m, args, out, name=name: seen.__setitem__(name, out))
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


def test_feed_forward_runs_on_merged_tokens_in_early_steps():
    unet = make_unet()
    handle = apply_agentsd(unet, recipe=replace(MERGED_FEED_FORWARD, levels=1))
    block = unet.down_blocks[0].attentions[0].transformer_blocks[0]
    seen = {}
    hooks = [
        block.norm3.register_forward_pre_hook(lambda m, args: seen.update(x=args[0])),
        block.register_forward_hook(lambda m, args, out: seen.update(out=out)),
        block.ff.register_forward_pre_hook(lambda m, args: seen.update(tokens=args[0].shape[1])),
    ]
    for t, tokens in ((999, 256 - int(256 * 0.4)), (1, 256)):
        call(unet, t)
        assert seen["tokens"] == tokens
    cells = draw_cells(16, 16, 4, (0, 0, 999.0))
    block.norm1.register_forward_pre_hook(lambda m, args: seen.update(block_input=args[0]))
    call(unet, 999)
    cut = cut_ranking(rank_tokens(seen["block_input"], split_grid(16, 16, 4, cells)), int(256 * 0.4))
    for hook in hooks:
        hook.remove()
    handle.remove()
    with torch.no_grad():
        expected = unmerge(block.ff(merge(block.norm3(seen["x"]), cut)), cut) + seen["x"]
    torch.testing.assert_close(seen["out"], expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("side", "agents"), [(16, 4 * 4), (64, 16 * 16), (65, 16 * 16), (96, 19 * 19), (256, 19 * 19)]
)
def test_agents_are_bounded(side, agents):
    plan = Agents().plan(Place((side, side), 1, 2, "cpu", (0, 0, 999.0)))
    assert plan.drawn.dst.numel() == agents
    tokens = torch.randn(1, side * side, 2, generator=torch.Generator().manual_seed(0))
    plan.rank(tokens)
    assert merge(tokens, plan.agents).shape == (1, agents, 2)


def test_the_papers_mode_bounds_no_agents():
    early, late = PAPER.attention.stages
    for operator, strides in ((early, 4), (late, 2)):
        plan = operator.plan(Place((96, 96), 1, 2, "cpu", (0, 0, 999.0)))
        assert plan.drawn.dst.numel() == (96 // strides) ** 2


def test_an_operator_alone_runs_in_every_step():
    unet = make_unet()
    with apply_agentsd(unet, recipe=Recipe(Phases(None, Downsample(), early_frac=0))):
        later = [call(unet, t) for t in (999, 1)]
    apply_agentsd(unet, recipe=TODO)
    for t, expected in zip((999, 1), later, strict=True):
        assert torch.equal(call(unet, t), expected)
