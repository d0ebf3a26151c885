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
from recipes import AGENTS_THEN_KEYS, STEP_CACHING
from tiny import call, make_controlnet, make_sdxl_unet, make_small_unet, make_unet, snapshot

from agentsd import Agents, Downsample, Merge, Phases, Recipe, StepCache, apply_agentsd, remove_agentsd
from agentsd.apply import handle_of
from agentsd.attention.formula import agent_attention
from agentsd.attention.matching import rank_tokens, sample_destinations, split_grid
from agentsd.attention.merging import make_merge_map, merge, unmerge
from agentsd.layers import PatchedLayers
from agentsd.recipe import AGENTSD, FAST


def cells(how):
    """Agents, then downsampled keys, with cells drawn so."""
    return Recipe(Phases(Agents(destinations=how), Downsample()))


def of_levels(levels):
    return replace(AGENTS_THEN_KEYS, levels=levels)


def test_remove_leaves_no_trace(pipe, sample):
    """And the patch that is applied last is in force."""
    before, image, keys = snapshot(pipe.unet), sample(pipe), list(pipe.unet.state_dict())
    first = apply_agentsd(pipe, recipe=AGENTS_THEN_KEYS)
    patched = sample(pipe)
    assert not torch.equal(patched, image)
    assert list(pipe.unet.state_dict()) == keys
    other = apply_agentsd(pipe, recipe=AGENTS_THEN_KEYS.with_settings(ratio=0.7))
    assert not torch.equal(sample(pipe), patched)
    first.remove()  # was replaced: must not touch the patch in force
    assert handle_of(pipe) is other
    apply_agentsd(pipe, recipe=AGENTS_THEN_KEYS)
    assert torch.equal(sample(pipe), patched)
    for _ in range(2):  # the second time is harmless
        remove_agentsd(pipe)
        assert snapshot(pipe.unet) == before
    assert torch.equal(sample(pipe), image)


def test_nothing_to_do_is_bit_identical_to_baseline(pipe, sample):
    baseline = sample(pipe)
    for nothing in (Merge(ratio=0), Phases(Agents(), Merge(ratio=0), 0), Phases(Agents(), None, 0)):
        with apply_agentsd(pipe, recipe=Recipe(nothing)):
            assert torch.equal(sample(pipe), baseline)


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


def test_attention_levels_are_counted_from_the_models_finest():
    names = apply_agentsd(make_sdxl_unet(), recipe=of_levels(1)).layer_names
    assert len(names) == 2 + 2 * 2
    assert {name.split(".")[0] + name.split(".")[1] for name in names} == {"down_blocks1", "up_blocks1"}
    assert len(apply_agentsd(make_unet(), recipe=of_levels(2)).layer_names) == 3 + 3
    assert len(apply_agentsd(make_small_unet(), recipe=AGENTS_THEN_KEYS).layer_names) == 3  # all on one level


def simple_blocks():
    kinds = ("SimpleCrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D")
    return make_unet(down_block_types=kinds)


def side_by_side():
    wrapped = torch.nn.DataParallel(make_unet())
    wrapped.device_ids = [0, 1]
    return wrapped


def with_processor(processor):
    unet = make_unet()
    unet.down_blocks[0].attentions[0].transformer_blocks[0].attn1.set_processor(processor)
    return unet


def weighted():
    """As IP-Adapter's own package has processors: a plain one's name, and weights."""
    processor = type("AttnProcessor2_0", (torch.nn.Module,), {})()
    processor.register_parameter("scale", torch.nn.Parameter(torch.ones(1)))
    return with_processor(processor)


def merged_by_tomesd():
    tomesd.apply_patch(unet := make_unet())
    return unet


def prior():
    """It has no image to merge tokens of."""
    sizes = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 1, "embedding_dim": 16}
    return diffusers.PriorTransformer(**sizes)


@pytest.mark.parametrize(
    ("make", "recipe", "error", "message"),
    [
        (make_unet, of_levels(4), ValueError, "levels=4.*3 levels"),
        (make_unet, 3, TypeError, "recipe=3: pass a Recipe, or its file or folder"),
        (lambda: torch.nn.Linear(1, 1), None, TypeError, "Linear has no U-Net"),
        (prior, AGENTSD, ValueError, "PriorTransformer has no self-attention that agentsd"),
        (lambda: with_processor(PAGIdentitySelfAttnProcessor2_0()), AGENTSD, ValueError, "PAGIdentity"),
        (weighted, AGENTSD, ValueError, "has a AttnProcessor2_0, which agent"),
        (merged_by_tomesd, AGENTSD, ValueError, r"tomesd.remove_patch"),
        (side_by_side, AGENTSD, TypeError, r"DataParallel on devices \[0, 1\].*DistributedDataParallel"),
        (make_controlnet, FAST, ValueError, r'ControlNetModel is no U-Net.*pass mode="agentsd"'),
        (make_unet, Recipe(steps=StepCache(layers=3)), ValueError, "layers=3: the last up block has 2"),
        (simple_blocks, STEP_CACHING, ValueError, "a SimpleCrossAttnDownBlock2D, which no cached step knows"),
    ],
)
def test_what_cannot_be_patched_is_refused_and_left(make, recipe, error, message):
    before = snapshot(target := make())
    with pytest.raises(error, match=message):
        apply_agentsd(target, recipe=recipe)
    assert snapshot(target) == before


@pytest.mark.parametrize("case", [(65, 49, 1), (9, 30, 3), (3, 3, 1)])
def test_any_size_and_batch(case):
    *size, batch = case
    unet = make_unet()
    apply_agentsd(unet, recipe=of_levels(2))
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
    oldest = weakref.ref(apply_agentsd(unet, recipe=AGENTSD))
    for seed in (3, 4):
        apply_agentsd(unet, recipe=AGENTS_THEN_KEYS.with_settings(seed=seed))
    gc.collect()
    assert oldest() is None
    with apply_agentsd(unet, recipe=AGENTSD), apply_agentsd(unet, recipe=AGENTS_THEN_KEYS):
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
