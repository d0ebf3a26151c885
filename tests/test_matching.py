import itertools

import pytest
import torch
from tomesd.merge import bipartite_soft_matching_random2d as tomesd_matching

from agentsd.attention import matching
from agentsd.attention.matching import rank_tokens, sample_destinations, split_grid
from agentsd.attention.merging import make_merge_map, merge, unmerge

GRIDS = [(8, 8, 2), (8, 8, 4), (9, 13, 4), (33, 25, 2), (7, 4, 3)]


@pytest.mark.parametrize(("height", "width", "stride"), GRIDS)
def test_each_whole_cell_holds_one_destination_and_nothing_is_lost(height, width, stride):
    partition = split_grid(height, width, stride, sample_destinations(height, width, stride, (0, 0, 981.0)))
    src, dst = partition.src, partition.dst
    assert sorted([*src.tolist(), *dst.tolist()]) == list(range(height * width))
    cells = [(p // width // stride, p % width // stride) for p in dst.tolist()]
    assert sorted(cells) == list(itertools.product(range(height // stride), range(width // stride)))


def test_cells_are_a_function_of_seed_layer_and_step_alone():
    # recorded: the same on every machine and in every process
    assert sample_destinations(8, 8, 4, (0, 0, 981.0)).tolist() == [[6, 7], [11, 6]]
    torch.manual_seed(1)
    before = torch.get_rng_state()
    assert sample_destinations(8, 8, 4, (0, 0, 981.0)).tolist() == [[6, 7], [11, 6]]
    assert torch.equal(torch.get_rng_state(), before)
    keys = [(1, 0, 981.0), (0, 1, 981.0), (0, 0, 961.0), (0, 0, 961.5)]
    draws = [sample_destinations(64, 64, 4, key) for key in keys]
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(draws, 2))
    assert sample_destinations(64, 64, 4, None).eq(0).all()


@pytest.mark.parametrize(("height", "width", "stride"), GRIDS)
@pytest.mark.parametrize("share", [0.1, 0.4, 0.74])
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
    # positions themselves are merged, so that equal outputs mean equal index sets
    places = torch.eye(n_tokens).expand(2, -1, -1)
    ours, theirs = merge(places, cut), their_merge(places)
    assert ours.shape == theirs.shape
    for image in range(2):
        rows = [sorted(map(tuple, m[image].nonzero().tolist())) for m in (ours, theirs)]
        groups = [
            {frozenset(c for r_, c in pairs if r_ == row) for row in range(ours.shape[1])} for pairs in rows
        ]
        assert groups[0] == groups[1]
    x = torch.randn(2, n_tokens, 5, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(unmerge(merge(x, cut), cut), their_unmerge(their_merge(x)), rtol=0, atol=1e-6)


def test_sources_are_ordered_by_similarity_to_their_best_destination():
    metric = torch.randn(3, 30, 8, generator=torch.Generator().manual_seed(0))
    partition = split_grid(5, 6, 3, sample_destinations(5, 6, 3, (0, 0, 1.0)))
    ranking = rank_tokens(metric, partition)
    for image, points in enumerate(metric.double()):
        unit = points / points.norm(dim=1, keepdim=True)
        ranked = partition.src[ranking.order[image]]
        scores = [max(float(unit[s] @ unit[d]) for d in partition.dst) for s in ranked]
        assert scores == sorted(scores, reverse=True)
        assert set(ranked.tolist()) == set(partition.src.tolist())
        matched = partition.dst[ranking.match[image]]
        pairs = zip(partition.src, matched, strict=True)
        best = [max(float(unit[s] @ unit[d]) for d in partition.dst) for s in partition.src]
        assert [float(unit[s] @ unit[d]) for s, d in pairs] == pytest.approx(best, abs=1e-6)


def test_score_matrix_in_slices_gives_the_same_ranking(monkeypatch):
    metric = torch.randn(2, 256, 16, generator=torch.Generator().manual_seed(0))
    partition = split_grid(16, 16, 4, sample_destinations(16, 16, 4, None))
    whole = rank_tokens(metric, partition)
    monkeypatch.setattr(matching, "SCORE_BUDGET", 2 * 16 * 7)
    sliced = rank_tokens(metric, partition)
    assert torch.equal(whole.order, sliced.order)
    assert torch.equal(whole.match, sliced.match)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_zero_norm_tokens_are_alike_to_none(dtype):
    metric = torch.randn(1, 64, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    metric[0, 5:9] = 0
    partition = split_grid(8, 8, 2, sample_destinations(8, 8, 2, None))
    ranking = rank_tokens(metric, partition)
    cut = make_merge_map(ranking, 20)
    assert merge(metric, cut).isfinite().all()
    assert not set(partition.src[ranking.order[0, :20]].tolist()) & {
        5,
        7,
    }  # sources among the zero tokens rank below likeness
