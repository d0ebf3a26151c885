"""A patch: what it does to a layer, when, and that its removal leaves no trace."""

import inspect
from dataclasses import replace

import diffusers
import pytest
import tomesd
import torch
from callers import inputs
from diffusers.models.attention import BasicTransformerBlock
from diffusers.models.attention_processor import (
    Attention,
    AttnProcessor,
    AttnProcessor2_0,
    PAGIdentitySelfAttnProcessor2_0,
)
from logs import warned
from recipes import AGENTS_THEN_KEYS
from tiny import call, make_sdxl_unet, make_unet, snapshot, watch_phases

from agentsd import Agents, Downsample, Merge, Phases, Recipe, apply_agentsd, remove_agentsd
from agentsd.attention.formula import agent_attention
from agentsd.attention.matching import rank_tokens, sample_destinations, split_grid
from agentsd.attention.merging import make_merge_map, merge, unmerge


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


@pytest.mark.parametrize("ratio", [0.2, 0.5])
def test_token_merging_alone_is_the_tomesd_packages(pipe, sample, ratio):
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
    ranking = rank_tokens(x, split_grid(16, 16, 4, sample_destinations(16, 16, 4, (5, 0, 999.0))))
    cut = make_merge_map(ranking, int(256 * ratio))
    with torch.no_grad():
        tokens, agents = (merge(block.norm1(x), c) for c in (cut, make_merge_map(ranking, 240)))
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


@pytest.mark.parametrize("case", [(65, 49, 1), (17, 16, 2), (9, 30, 3), (4, 4, 2), (3, 3, 1)])
def test_any_size_and_batch(case):
    *size, batch = case
    unet = make_unet()
    apply_agentsd(unet, recipe=replace(AGENTS_THEN_KEYS, levels=2))
    for t in (999, 1):
        out = call(unet, t, size, batch)
        assert out.shape == (batch, 4, *size)
        assert out.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("t", [999, 1])
def test_half_precision_stays_near_float32(dtype, t):
    unet = make_unet()
    apply_agentsd(unet, recipe=cells("first"))
    exact = call(unet, t)
    half = call(unet.to(dtype), t, dtype=dtype)
    assert half.dtype == dtype
    assert (half.float() - exact).abs().mean() < 0.03 * exact.abs().mean()


def test_upcast_attention_takes_the_softmax_inputs_to_float32(monkeypatch):
    seen = []

    def spy(query, *rest):
        seen.append(query.dtype)
        return agent_attention(query, *rest)

    monkeypatch.setattr("agentsd.attention.agents.agent_attention", spy)
    for upcast in (False, True):
        unet = make_unet(upcast_attention=upcast).to(torch.bfloat16)
        apply_agentsd(unet, recipe=replace(AGENTS_THEN_KEYS, levels=1))
        call(unet, dtype=torch.bfloat16)
    assert set(seen[:3]) == {torch.bfloat16}
    assert set(seen[3:]) == {torch.float32}


def test_same_seed_same_bits(pipe, sample):
    """No global generator, no call counter."""
    apply_agentsd(pipe, recipe=cells("random"))
    torch.manual_seed(1)
    first = sample(pipe)
    torch.manual_seed(2)
    assert torch.equal(sample(pipe), first)


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


@pytest.mark.parametrize("kind", ["PNDM", "EulerAncestralDiscrete", "HeunDiscrete", "UniPCMultistep", "LCM"])
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


def test_a_model_with_no_layer_to_patch_is_refused():
    with pytest.raises(TypeError, match="NoneType has no U-Net"):
        remove_agentsd(None)
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


def test_the_processor_that_was_there_does_the_later_steps(pipe, sample):
    recipe = Recipe(Phases(Agents(0.5), Merge(0.5, destinations="first"), early_frac=0))
    baseline = sample(pipe)
    pipe.unet.set_attn_processor(AttnProcessor())
    handle = apply_agentsd(pipe, recipe=recipe)
    assert {type(one.fallback) for one in handle._layers.processors} == {AttnProcessor}
    with_unfused = sample(pipe)
    remove_agentsd(pipe)
    pipe.unet.set_attn_processor(AttnProcessor2_0())
    apply_agentsd(pipe, recipe=recipe)
    torch.testing.assert_close(sample(pipe), with_unfused, rtol=0, atol=1e-4)
    assert not torch.allclose(with_unfused, baseline, atol=1e-3)


def test_the_host_internals_that_the_patch_stands_on():
    """A canary: fails loudly when a new diffusers release moves what the patch relies on."""
    parameters = list(inspect.signature(AttnProcessor2_0.__call__).parameters)
    assert parameters[1:5] == ["attn", "hidden_states", "encoder_hidden_states", "attention_mask"]
    assert hasattr(Attention, "set_processor")
    unet = make_unet()
    names = list(inspect.signature(type(unet).forward).parameters)
    assert names[1:3] == ["sample", "timestep"]
    blocks = [m for m in unet.modules() if isinstance(m, BasicTransformerBlock)]
    assert blocks
    for block in blocks:
        assert not block.only_cross_attention
        assert hasattr(block, "norm1")
        attn = block.attn1
        for name in (
            "to_q", "to_k", "to_v", "to_out", "heads", "norm_q", "norm_k", "upcast_attention",
            "upcast_softmax", "rescale_output_factor", "processor", "fused_projections",
        ):  # fmt: skip
            assert hasattr(attn, name), name
        # agent attention replaces these layers' whole forward: they must do nothing that it does not
        assert attn.spatial_norm is None
        assert attn.group_norm is None
        assert not attn.residual_connection
        assert type(attn.processor) is AttnProcessor2_0
