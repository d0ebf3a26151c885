"""A patch: what it does to a layer, when, that its removal leaves no trace, and one patch upon another."""

import gc
import weakref
from dataclasses import replace

import diffusers
import pytest
import tomesd
import torch
from callers import inputs
from diffusers.models.attention_processor import PAGIdentitySelfAttnProcessor2_0
from logs import warned
from recipes import AGENTS_THEN_KEYS, STEP_CACHING
from tiny import call, make_sdxl_unet, make_unet, snapshot, watch_phases

from agentsd import Agents, Downsample, Merge, Phases, Recipe, apply_agentsd, remove_agentsd
from agentsd.apply import handle_of
from agentsd.attention import ranking
from agentsd.attention.formula import agent_attention
from agentsd.attention.matching import rank_tokens, sample_destinations, split_grid
from agentsd.attention.merging import make_merge_map, merge, unmerge
from agentsd.attention.operator import GridContext
from agentsd.layers import PatchedLayers
from agentsd.recipe import AGENTSD


def cells(how):
    """Agents, then downsampled keys, with cells drawn so."""
    return Recipe(Phases(Agents(destinations=how), Downsample()))


def test_remove_leaves_no_trace(pipe, sample):
    before, image, keys = snapshot(pipe.unet), sample(pipe), list(pipe.unet.state_dict())
    handle = apply_agentsd(pipe, recipe=AGENTS_THEN_KEYS)
    patched = sample(pipe)
    assert not torch.equal(patched, image)
    assert list(pipe.unet.state_dict()) == keys
    handle.remove()
    assert snapshot(pipe.unet) == before
    assert torch.equal(sample(pipe), image)
    handle.remove()  # harmless
    remove_agentsd(pipe)
    with apply_agentsd(pipe, recipe=AGENTS_THEN_KEYS):
        assert torch.equal(sample(pipe), patched)
    assert snapshot(pipe.unet) == before


def test_nothing_to_do_is_bit_identical_to_baseline(pipe, sample):
    baseline = sample(pipe)
    for nothing in (Merge(ratio=0), Phases(Agents(), Merge(ratio=0), 0), Phases(Agents(), None, 0)):
        with apply_agentsd(pipe, recipe=Recipe(nothing)):
            assert torch.equal(sample(pipe), baseline)
    with apply_agentsd(pipe, recipe=Recipe(Phases(Agents(), None))):
        assert not torch.equal(sample(pipe), baseline)


def test_token_merging_alone_is_the_tomesd_packages(pipe, sample):
    ratio = 0.5
    baseline = sample(pipe)
    tomesd.apply_patch(pipe, ratio=ratio, use_rand=False)
    their_call, theirs = call(pipe.unet), sample(pipe)
    tomesd.remove_patch(pipe)
    merge_all = Recipe(Merge(ratio, ranking="layer", destinations="first"), levels=1)
    with apply_agentsd(pipe, recipe=merge_all):
        ours_call, ours = call(pipe.unet), sample(pipe)
    torch.testing.assert_close(ours_call, their_call, rtol=0, atol=2e-6)
    # over a run of 6 calls rounding grows with the latents
    assert (ours - theirs).abs().max() < 1e-5 * theirs.abs().max() < 1e-2 * (baseline - theirs).abs().max()


@pytest.mark.parametrize("ratio", [0.0, 0.4])
def test_one_layer_is_equation_9_on_the_blocks_own_tensors(ratio):
    """The patched layer's output, rebuilt from the layer's own weights and the block's input."""
    unet = make_unet()
    block = unet.down_blocks[0].attentions[0].transformer_blocks[0]
    handle = apply_agentsd(unet, recipe=AGENTS_THEN_KEYS.with_settings(ratio=ratio, seed=5))
    seen = {}
    block.register_forward_pre_hook(lambda m, args: seen.update(x=args[0]))
    block.attn1.register_forward_hook(lambda m, args, out: seen.update(out=out))
    call(unet, t=999)
    assert handle.layer_names[0] == "down_blocks.0.attentions.0.transformer_blocks.0.attn1"

    x, attn = seen["x"], block.attn1
    ranked = rank_tokens(x, split_grid(16, 16, 4, sample_destinations(16, 16, 4, (5, 0, 999.0))))
    cut = make_merge_map(ranked, int(256 * ratio))
    with torch.no_grad():
        tokens, agents = (merge(block.norm1(x), c) for c in (cut, make_merge_map(ranked, 240)))
        assert agents.shape[1] == 16
        projected = attn.to_q(tokens), attn.to_k(tokens), attn.to_v(tokens), attn.to_q(agents)
        q, k, v, a = (rows.unflatten(2, (2, 8)).transpose(1, 2) for rows in projected)
        mixed = agent_attention(q, k, v, a, 0.075, -0.15).transpose(1, 2).flatten(2)
        expected = unmerge(attn.to_out[0](mixed), cut)
    torch.testing.assert_close(seen["out"], expected, rtol=0, atol=1e-6)


def test_the_finest_attention_level_is_counted_from_the_model():
    sdxl = make_sdxl_unet()
    names = apply_agentsd(sdxl, recipe=replace(AGENTS_THEN_KEYS, levels=1)).layer_names
    assert len(names) == 2 + 2 * 2
    assert {name.split(".")[0] + name.split(".")[1] for name in names} == {"down_blocks1", "up_blocks1"}
    baseline = make_sdxl_unet()
    assert not torch.equal(call(sdxl), call(baseline))
    assert len(apply_agentsd(make_unet(), recipe=replace(AGENTS_THEN_KEYS, levels=2)).layer_names) == 3 + 3


@pytest.mark.parametrize("case", [(65, 49, 1), (9, 30, 3), (3, 3, 1)])
def test_any_size_and_batch(case):
    *size, batch = case
    unet = make_unet()
    apply_agentsd(unet, recipe=replace(AGENTS_THEN_KEYS, levels=2))
    for t in (999, 1):
        out = call(unet, t, size, batch)
        assert out.shape == (batch, 4, *size)
        assert out.isfinite().all()


@pytest.mark.parametrize(("dtype", "t"), [(torch.bfloat16, 999), (torch.float16, 1)])
def test_half_precision_stays_near_float32(dtype, t):
    unet = make_unet()
    apply_agentsd(unet, recipe=cells("first"))
    exact = call(unet, t)
    half = call(unet.to(dtype), t, dtype=dtype)
    assert half.dtype == dtype
    assert (half.float() - exact).abs().mean() < 0.03 * exact.abs().mean()


def test_upcast_attention_takes_the_softmax_inputs_to_float32(monkeypatch):
    seen = []

    def spy(*inputs):
        seen.append({x.dtype for x in inputs[:4]})
        return agent_attention(*inputs)

    monkeypatch.setattr("agentsd.attention.agents.agent_attention", spy)
    for upcast, expected in ((False, {torch.bfloat16}), (True, {torch.float32})):
        apply_agentsd(unet := make_unet(upcast_attention=upcast).bfloat16(), recipe=AGENTS_THEN_KEYS)
        call(unet, dtype=torch.bfloat16)
        assert seen.pop() == expected


def test_an_image_does_not_depend_on_its_batch():
    """Nor on its place there: guidance's branches share cells, also one at a time, as a guider calls them."""
    latent, text = inputs()
    apply_agentsd(unet := make_unet(), recipe=cells("random"))
    with torch.no_grad():
        together, swapped, *alone = (
            unet(latent[place], torch.tensor(999), text[place]).sample for place in ([0, 1], [1, 0], [0], [1])
        )
    torch.testing.assert_close(torch.cat(alone), together, rtol=0, atol=2e-6)
    torch.testing.assert_close(swapped.flip(0), together, rtol=0, atol=2e-6)


@pytest.mark.parametrize("kind", ["EulerAncestralDiscrete", "HeunDiscrete"])
def test_phases_in_a_run_of_each_scheduler(pipe, sample, kind):
    """The scheduler is swapped after the patch; the early calls are counted from what the layers do."""
    phases = watch_phases(apply_agentsd(pipe, recipe=AGENTS_THEN_KEYS))
    pipe.scheduler = getattr(diffusers, f"{kind}Scheduler").from_config(pipe.scheduler.config)
    steps = []
    pipe.unet.register_forward_pre_hook(lambda module, args: steps.append(float(args[1])))
    sample(pipe, num_inference_steps=10)
    distinct = sorted(set(pipe.scheduler.timesteps.tolist()), reverse=True)
    early = set(distinct[: round(0.4 * len(distinct))])
    for calls in phases.values():
        assert calls == ["agent" if t in early else "downsample" for t in steps]
        assert 0 < calls.count("agent") < len(calls)


def test_a_run_without_an_early_step_is_said_once(make_pipeline):
    base = make_pipeline()
    pipe = diffusers.StableDiffusionImg2ImgPipeline(**base.components, requires_safety_checker=False)
    pipe.set_progress_bar_config(disable=True)
    apply_agentsd(pipe, recipe=AGENTS_THEN_KEYS)
    image = torch.zeros(1, 3, 32, 32)

    def run(strength):
        pipe("a cat", image=image, strength=strength, num_inference_steps=10, output_type="latent")

    with warned("no early step") as caught:
        run(0.5)
    assert len(caught) == 1
    run(0.5)  # a second warning would be an error here
    run(1.0)


@pytest.mark.parametrize(
    ("make", "settings", "error", "message"),
    [
        (make_unet, {"ratio": 1.5}, ValueError, "ratio=1.5"),
        (make_unet, {"recipe": replace(AGENTS_THEN_KEYS, levels=4)}, ValueError, "levels=4.*3 levels"),
        (dict, {}, TypeError, "dict has no U-Net"),
        (lambda: torch.nn.Linear(1, 1), {}, TypeError, "Linear has no U-Net"),
        (make_unet, {"recipe": 3}, TypeError, "recipe=3 is a int: pass a Recipe, or its file or folder"),
    ],
)
def test_bad_input_changes_nothing(make, settings, error, message):
    target = make()
    before = snapshot(target) if isinstance(target, torch.nn.Module) else None
    with pytest.raises(error, match=message):
        apply_agentsd(target, **settings)
    assert before is None or snapshot(target) == before


def test_an_application_that_breaks_off_leaves_the_patch_that_was_there(monkeypatch):
    clean = snapshot(unet := make_unet())
    outer = apply_agentsd(unet, recipe=AGENTS_THEN_KEYS)
    patched, attach, calls = call(unet), PatchedLayers.attach, []

    def break_off(self):
        attach(self)
        calls.append(self)
        if len(calls) == 1:
            raise MemoryError

    monkeypatch.setattr(PatchedLayers, "attach", break_off)
    with pytest.raises(MemoryError):
        apply_agentsd(unet, recipe=STEP_CACHING)
    assert handle_of(unet) is outer
    assert torch.equal(call(unet), patched)
    outer.remove()
    assert snapshot(unet) == clean


def test_a_model_with_no_layer_to_patch_is_refused():
    unet = make_unet(
        down_block_types=("DownBlock2D",) * 3, up_block_types=("UpBlock2D",) * 3, mid_block_type=None
    )
    with pytest.raises(ValueError, match="no self-attention that agentsd could patch"):
        apply_agentsd(unet, recipe=AGENTS_THEN_KEYS)


def test_tomesd_and_strange_processors_are_refused(pipe):
    tomesd.apply_patch(pipe)
    with pytest.raises(ValueError, match=r"tomesd.remove_patch"):
        apply_agentsd(pipe, recipe=AGENTS_THEN_KEYS)
    tomesd.remove_patch(pipe)
    attn = pipe.unet.down_blocks[0].attentions[0].transformer_blocks[0].attn1
    attn.set_processor(PAGIdentitySelfAttnProcessor2_0())
    with pytest.raises(ValueError, match="PAGIdentitySelfAttnProcessor2_0"):
        apply_agentsd(pipe, recipe=AGENTS_THEN_KEYS)
    assert isinstance(attn.processor, PAGIdentitySelfAttnProcessor2_0)


BY_LEVEL, BY_LAYER = [64, 256], [64] * 3 + [256] * 3
"""The tokens of each ranking of a call: of two levels, and of their six layers."""


@pytest.mark.parametrize(
    ("phases", "early", "late"),
    [
        (replace(AGENTSD, levels=2).attention, BY_LAYER, BY_LAYER),
        (Phases(Agents(), Downsample()), BY_LEVEL, []),
        (Phases(Agents(), Merge(ranking="layer")), BY_LEVEL, BY_LAYER),
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


def test_a_recipe_takes_the_levels_there_are():
    one_level = make_unet(
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D", "CrossAttnUpBlock2D"),
        mid_block_type=None,
    )
    assert len(apply_agentsd(one_level, recipe=AGENTS_THEN_KEYS).layer_names) == 3
    with pytest.raises(ValueError, match="levels=2"):
        apply_agentsd(one_level, recipe=replace(AGENTS_THEN_KEYS, levels=2))


@pytest.mark.parametrize(("side", "agents"), [(16, 4 * 4), (65, 16 * 16), (96, 19 * 19)])
def test_agents_are_bounded(side, agents):
    """In the paper's mode they are not."""
    plan = AGENTSD.attention.stages[0].plan(GridContext((side, side), 1, "cpu", (0, 0, 999.0)))
    assert plan.partition.dst.numel() == (side // 4) ** 2
    plan = Agents().plan(GridContext((side, side), 1, "cpu", (0, 0, 999.0)))
    assert plan.partition.dst.numel() == agents
    tokens = torch.randn(1, side * side, 2, generator=torch.Generator().manual_seed(0))
    plan.rank(tokens)
    assert merge(tokens, plan.maps.agents).shape == (1, agents, 2)


def test_apply_twice_equals_once_and_takes_the_new_settings(pipe, sample):
    before = snapshot(pipe.unet)
    first = apply_agentsd(pipe, recipe=AGENTS_THEN_KEYS)
    once = sample(pipe)
    other = apply_agentsd(pipe, recipe=AGENTS_THEN_KEYS.with_settings(ratio=0.7))
    assert not torch.equal(sample(pipe), once)
    first.remove()  # was replaced: must not touch the patch in force
    assert handle_of(pipe) is other
    apply_agentsd(pipe, recipe=AGENTS_THEN_KEYS)
    assert torch.equal(sample(pipe), once)
    remove_agentsd(pipe)
    assert snapshot(pipe.unet) == before


def test_a_block_inside_another_puts_the_outer_patch_back(pipe, sample):
    before, baseline = snapshot(pipe.unet), sample(pipe)
    with apply_agentsd(pipe, recipe=AGENTS_THEN_KEYS) as outer:
        first = sample(pipe)
        with apply_agentsd(pipe, recipe=AGENTS_THEN_KEYS.with_settings(ratio=0.6)) as inner:
            second = sample(pipe)
            with apply_agentsd(pipe, recipe=Recipe(Phases(Merge(), None))):
                third = sample(pipe)
            assert handle_of(pipe) is inner
            assert torch.equal(sample(pipe), second)
        assert handle_of(pipe) is outer
        assert torch.equal(sample(pipe), first)
    assert snapshot(pipe.unet) == before
    assert torch.equal(sample(pipe), baseline)
    assert not any(torch.equal(a, b) for a, b in [(first, second), (second, third), (third, baseline)])


def test_plain_patches_in_a_row_keep_no_older_one_alive():
    """Only what a `with` block puts back is kept."""
    unet = make_unet()
    handles = [apply_agentsd(unet, recipe=AGENTS_THEN_KEYS.with_settings(seed=seed)) for seed in range(5)]
    oldest = weakref.ref(handles[0])
    del handles
    gc.collect()
    assert oldest() is None
    with (
        apply_agentsd(unet, recipe=AGENTS_THEN_KEYS.with_settings(seed=7)),
        apply_agentsd(unet, recipe=AGENTS_THEN_KEYS.with_settings(seed=8)),
    ):
        pass
    assert handle_of(unet).recipe.seed == 4


def test_an_outer_handle_that_is_gone_does_not_come_back():
    clean = snapshot(unet := make_unet())
    for away in (lambda outer: outer.remove(), lambda outer: outer.__exit__(None, None, None)):
        outer = apply_agentsd(unet, recipe=AGENTSD)
        with apply_agentsd(unet, recipe=STEP_CACHING):
            away(outer)
        assert handle_of(unet) is None
        assert snapshot(unet) == clean
