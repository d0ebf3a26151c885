"""The patch under abuse: odd shapes by the thousand, many runs, threads, copies."""

import gc
import inspect
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from diffusers.models.attention import BasicTransformerBlock
from diffusers.models.attention_processor import Attention, AttnProcessor2_0
from hypothesis import given, settings
from hypothesis import strategies as st
from recipes import AGENTS_THEN_KEYS
from tiny import call, make_unet

from agentsd import Agents, Downsample, Phases, Recipe, apply_agentsd, remove_agentsd
from agentsd.attention.formula import agent_attention
from agentsd.attention.matching import rank_tokens, sample_destinations, split_grid
from agentsd.attention.merging import make_merge_map, merge, unmerge


@settings(max_examples=400, deadline=None)
@given(
    height=st.integers(1, 17),
    width=st.integers(1, 17),
    stride=st.integers(2, 5),
    batch=st.integers(1, 3),
    channels=st.sampled_from([1, 3, 8]),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
    ratio=st.floats(0, 0.99),
    zeros=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_every_token_is_accounted_for(height, width, stride, batch, channels, dtype, ratio, zeros, seed):
    if min(height, width) < stride:
        return  # no whole cell: the patch leaves such a layer alone
    tokens = height * width
    x = torch.randn(batch, tokens, channels, generator=torch.Generator().manual_seed(seed)).to(dtype)
    if zeros:
        x[:, :: max(1, tokens // 3)] = 0
    partition = split_grid(height, width, stride, sample_destinations(height, width, stride, (seed, 0, 1.0)))
    cut = make_merge_map(rank_tokens(x, partition), int(tokens * ratio), dtype)
    merged = merge(x, cut)
    left = tokens - min(int(tokens * ratio), partition.src.numel())
    assert merged.shape == (batch, left, channels)
    assert merged.isfinite().all()
    back = unmerge(merged, cut)
    assert back.shape == x.shape
    # each merged token is the mean of the tokens that get its value back
    homes = cut.assignment.view(batch, tokens)
    assert sorted(set(homes.flatten().tolist())) == list(range(batch * left))
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, 0.05)
    assert (back.double().sum(1) - x.double().sum(1)).abs().max() <= tolerance * tokens
    # what was not merged is untouched
    alone = torch.bincount(cut.assignment)[cut.assignment].view(batch, tokens) == 1
    assert torch.equal(back[alone], x[alone])


@settings(max_examples=150, deadline=None)
@given(
    n=st.integers(1, 30),
    agents=st.integers(1, 9),
    width=st.integers(1, 12),
    size=st.sampled_from([0.0, 1.0, 1e4]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    scale=st.floats(-2, 0),
    k=st.floats(0, 2),
)
def test_finite_in_finite_out(n, agents, width, size, dtype, scale, k):
    rng = torch.Generator().manual_seed(n)
    query, key, value = (size * torch.randn(3, 1, 2, n, width, generator=rng)).to(dtype)
    agent = (size * torch.randn(1, 2, agents, width, generator=rng)).to(dtype)
    out = agent_attention(query, key, value, agent, k, scale)
    assert out.shape == query.shape
    assert out.isfinite().all()
    # a weighted mean of values, and k of the own value
    bound = (1 + k) * value.abs().max().double()
    assert out.abs().max().double() <= bound * 1.02 + 1e-6


def live_tensors():
    gc.collect()
    return sum(isinstance(o, torch.Tensor) for o in gc.get_objects())


def test_forty_runs_leave_nothing_behind():
    unet = make_unet()
    first = call(unet, 999, (8, 8))
    with apply_agentsd(unet, recipe=AGENTS_THEN_KEYS.with_settings(early_frac=0.5)):
        patched = call(unet, 999, (8, 8))
    tensors, hooks = live_tensors(), sum(len(m._forward_pre_hooks) for m in unet.modules())
    for _ in range(40):
        apply_agentsd(unet, recipe=AGENTS_THEN_KEYS.with_settings(early_frac=0.5))
        out = call(unet, 999, (8, 8))
        remove_agentsd(unet)
    assert torch.equal(out, patched)
    assert torch.equal(call(unet, 999, (8, 8)), first)
    del out
    assert live_tensors() <= tensors
    assert sum(len(m._forward_pre_hooks) for m in unet.modules()) == hooks


def test_two_models_with_different_settings_in_two_threads():
    jobs = [(make_unet(), {"ratio": 0.3}, 999), (make_unet(), {"ratio": 0.6, "seed": 1}, 1)]
    for unet, options, _ in jobs:
        apply_agentsd(unet, **options)
    alone = [call(unet, t) for unet, _, t in jobs]
    failures = []

    def work(unet, t, expected):
        for _ in range(20):
            if not torch.equal(call(unet, t), expected):
                failures.append(t)

    threads = [
        threading.Thread(target=work, args=(unet, t, expected))
        for (unet, _, t), expected in zip(jobs, alone, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.parametrize("position", [0, 1])
def test_an_image_does_not_depend_on_its_place_in_the_batch(position):
    """The property holds for the baseline model up to rounding; so for the patched one."""
    unet = make_unet()
    apply_agentsd(unet, recipe=Recipe(Phases(Agents(destinations="random"), Downsample())))
    rng = torch.Generator().manual_seed(0)
    latent, text = torch.randn(2, 4, 16, 16, generator=rng), torch.randn(2, 7, 16, generator=rng)
    with torch.no_grad():
        both = unet(latent, torch.tensor(999), text).sample[position]
        swapped = unet(latent.flip(0), torch.tensor(999), text.flip(0)).sample[1 - position]
    torch.testing.assert_close(both, swapped, rtol=0, atol=1e-6)


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


def test_same_bits_in_another_process():
    code = (
        "from tiny import call, make_unet; from agentsd import apply_agentsd\n"
        "unet = make_unet(); apply_agentsd(unet, mode='agentsd')\n"
        "total = call(unet, 999).double().sum().item().hex()"
    )
    own: dict = {}
    exec(code, own)
    other = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", f"{code}\nprint(total)"],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parent,
        env=os.environ | {"PYTHONHASHSEED": "1"},
    ).stdout.split()[-1]
    assert other == own["total"]
