import pytest
import torch

from agentsd.attention.matching import Ranking
from agentsd.attention.merging import join, make_merge_map, merge, merge_rows, unmerge

# Two images of six tokens; destinations 0 and 3.
RANKING = Ranking(
    order=torch.tensor([[3, 0, 2, 1], [1, 2, 0, 3]]),  # 5 1 4 2, and 2 4 1 5
    match=torch.tensor([[0, 0, 1, 1], [1, 0, 0, 1]]),
    src=torch.tensor([1, 2, 4, 5]),
    dst=torch.tensor([0, 3]),
)
X = torch.arange(12.0).view(2, 6, 1)


def test_merge_by_hand():
    merged = merge(X, make_merge_map(RANKING, 3))
    # image 0: 5 and 4 join 3, 1 joins 0, 2 stays; image 1 (values 6..11): 2 and 4 join 0, 1 joins 3, 5 stays
    assert merged.flatten().tolist() == [2, 0.5, 4, 11, (6 + 8 + 10) / 3, (9 + 7) / 2]


def test_unmerge_by_hand():
    cut = make_merge_map(RANKING, 3)
    back = unmerge(torch.tensor([[[20.0], [21.0], [22.0]], [[30.0], [31.0], [32.0]]]), cut)
    assert back[0].flatten().tolist() == [21, 21, 20, 22, 22, 22]
    assert back[1].flatten().tolist() == [31, 32, 31, 32, 31, 30]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("r", "further"), [(3, 4), (0, 4), (1, 2)])
def test_two_maps_are_merged_in_one_pass(r, further, dtype):
    x, maps = X.to(dtype), [make_merge_map(RANKING, n, dtype) for n in (r, further)]
    expected = [merge(x, each) for each in maps]
    joined, *parts = join(*maps)
    for part, each in zip(parts, expected, strict=True):
        assert torch.equal(merge(x, part), each)
    assert torch.equal(merge_rows(x, joined), torch.cat([part.flatten(0, 1) for part in expected]))
    assert torch.equal(unmerge(expected[0], joined), unmerge(expected[0], maps[0]))


@pytest.mark.parametrize("r", [0, 1, 4, 99])
def test_a_cut_takes_at_most_all_sources_and_keeps_the_mass(r):
    cut = make_merge_map(RANKING, r)
    merged = merge(X, cut)
    assert merged.shape[1] == max(6 - r, 2)
    # every token is counted once: what is unmerged, weighted by how often it was copied, sums to the whole
    torch.testing.assert_close(unmerge(merged, cut).sum(1), X.sum(1))


def test_merging_is_differentiable():
    x = torch.randn(2, 6, 3, dtype=torch.float64, requires_grad=True)
    cut = make_merge_map(RANKING, 3)
    assert torch.autograd.gradcheck(lambda x: unmerge(merge(x, cut), cut), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_half_precision_sums_are_taken_in_float32_whatever_was_ranked(dtype):
    """2,001 tokens of 1 and 3 joined in float16 steps would stop counting at 2,048."""
    n = 4001
    order, src = torch.arange(n - 1)[None], torch.arange(1, n)
    ranking = Ranking(order, torch.zeros_like(order), src, torch.tensor([0]))
    x = torch.ones(1, n, 1, dtype=torch.float16)
    assert merge(x, make_merge_map(ranking, n, dtype)).item() == 1


def test_the_example_beside_the_index_algebra():
    order, match = torch.tensor([[2, 1, 0]]), torch.zeros(1, 3, dtype=torch.int64)
    found = make_merge_map(Ranking(order, match, torch.tensor([0, 2, 3]), torch.tensor([1])), 1)
    assert [part.tolist() for part in found] == [[1, 2, 0, 2], [2, 0, 1, 3], [0, 1, 2, 4], [1, 1, 0.5, 0.5]]
