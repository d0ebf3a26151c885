"""Which tokens are merged into which, and merging there and back."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tomesd.merge import bipartite_soft_matching_random2d as tomesd_matching

from agentsd.attention import matching
from agentsd.attention.matching import Ranking, rank_tokens, sample_destinations, split_grid
from agentsd.attention.merging import make_merge_map, merge, unmerge


def test_cells_are_a_function_of_seed_layer_and_step_alone():
    # recorded: the same on every machine and in every process
    assert sample_destinations(8, 8, 4, (0, 0, 981.0)).tolist() == [[6, 7], [11, 6]]
    torch.manual_seed(1)
    before = torch.get_rng_state()
    assert sample_destinations(8, 8, 4, (0, 0, 981.0)).tolist() == [[6, 7], [11, 6]]
    assert torch.equal(torch.get_rng_state(), before)
    keys = [(0, 0, 981.0), (1, 0, 981.0), (0, 1, 981.0), (0, 0, 961.0), (0, 0, 961.5)]
    draws = [sample_destinations(64, 64, 4, key) for key in keys]
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(draws, 2))
    assert sample_destinations(64, 64, 4, None).eq(0).all()


@pytest.mark.parametrize(("height", "width", "stride"), [(8, 8, 2), (9, 13, 4), (7, 4, 3)])
@pytest.mark.parametrize("share", [0.1, 0.74])
def test_merge_and_unmerge_are_those_of_the_tomesd_package(height, width, stride, share):
    """tomesd, given the same random cells, merges the same tokens into the same places."""
    n_tokens = height * width
    metric = torch.randn(2, n_tokens, 24, generator=torch.Generator().manual_seed(1))
    r = int(n_tokens * share)
    seeded = torch.Generator().manual_seed(7)
    cells = torch.randint(stride**2, (height // stride, width // stride, 1), generator=seeded)[..., 0]
    their_merge, their_unmerge = tomesd_matching(
        metric, width, height, stride, stride, r, generator=torch.Generator().manual_seed(7)
    )

    cut = make_merge_map(rank_tokens(metric, split_grid(height, width, stride, cells)), r)
    x = torch.randn(2, n_tokens, 5, generator=torch.Generator().manual_seed(2))
    assert merge(x, cut).shape == their_merge(x).shape
    torch.testing.assert_close(unmerge(merge(x, cut), cut), their_unmerge(their_merge(x)), rtol=0, atol=1e-6)


def test_score_matrix_in_slices_gives_the_same_ranking(monkeypatch):
    metric = torch.randn(2, 256, 16, generator=torch.Generator().manual_seed(0))
    partition = split_grid(16, 16, 4, sample_destinations(16, 16, 4, None))
    whole = rank_tokens(metric, partition)
    monkeypatch.setattr(matching, "SCORE_BUDGET", 2 * 16 * 7)
    sliced = rank_tokens(metric, partition)
    assert torch.equal(whole.order, sliced.order)
    assert torch.equal(whole.match, sliced.match)


def test_zero_norm_tokens_are_alike_to_none():
    metric = torch.randn(1, 64, 8, generator=torch.Generator().manual_seed(0)).half()
    metric[0, 5:9] = 0
    partition = split_grid(8, 8, 2, sample_destinations(8, 8, 2, None))
    ranking = rank_tokens(metric, partition)
    cut = make_merge_map(ranking, 20)
    assert merge(metric, cut).isfinite().all()
    best = set(partition.src[ranking.order[0, :20]].tolist())
    assert not best & {5, 7}  # sources among the zero tokens rank below likeness


@settings(max_examples=60, deadline=None)
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
    cells = [(p // width // stride, p % width // stride) for p in partition.dst.tolist()]
    assert sorted(cells) == list(itertools.product(range(height // stride), range(width // stride)))
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


def test_merging_by_hand():
    """Two images of six tokens; destinations 0 and 3."""
    ranking = Ranking(
        order=torch.tensor([[3, 0, 2, 1], [1, 2, 0, 3]]),  # 5 1 4 2, and 2 4 1 5
        match=torch.tensor([[0, 0, 1, 1], [1, 0, 0, 1]]),
        src=torch.tensor([1, 2, 4, 5]),
        dst=torch.tensor([0, 3]),
    )
    cut = make_merge_map(ranking, 3)
    # image 0: 5 and 4 join 3, 1 joins 0, 2 stays; image 1 (values 6..11): 2 and 4 join 0, 1 joins 3, 5 stays
    merged = merge(torch.arange(12.0).view(2, 6, 1), cut)
    assert merged.flatten().tolist() == [
        2,
        0.5,
        4,
        11,
        (6 + 8 + 10) / 3,
        (9 + 7) / 2,
    ]
    back = unmerge(torch.tensor([[[20.0], [21.0], [22.0]], [[30.0], [31.0], [32.0]]]), cut)
    assert back.flatten().tolist() == [21, 21, 20, 22, 22, 22, 31, 32, 31, 32, 31, 30]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_half_precision_sums_are_taken_in_float32_whatever_was_ranked(dtype):
    """2,001 tokens of 1 and 3 joined in float16 steps would stop counting at 2,048."""
    n = 4001
    order, src = torch.arange(n - 1)[None], torch.arange(1, n)
    ranking = Ranking(order, torch.zeros_like(order), src, torch.tensor([0]))
    x = torch.ones(1, n, 1, dtype=torch.float16)
    assert merge(x, make_merge_map(ranking, n, dtype)).item() == 1
