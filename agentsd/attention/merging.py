"""Apply a ranking: merge tokens into their destinations, and copy them back (ToMeSD, section 3)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from .matching import Ranking

_HALF = (torch.float16, torch.bfloat16)  # a weight would be rounded to that


class MergeMap(NamedTuple):
    """Which tokens become one, and the way back: index tensors over all images of a batch.

    Attributes:
        assignment: (B * N,) row of the merged token that each token is in; empty where none is unmerged.
        members: (B * N,) rows of the tokens, those of one merged token side by side.
        offsets: (B * (N-r) + 1,) where in `members` each merged token's rows begin, and their end.
        weights: (B * N,) weight of each member in its merged token's mean; None takes the mean as it comes.
    """

    assignment: Tensor
    members: Tensor
    offsets: Tensor
    weights: Tensor | None


def make_merge_map(ranking: Ranking, r: int, dtype: torch.dtype = torch.float32) -> MergeMap:
    """Merge the `r` best-matched sources, at most all of them; `dtype` is that of the tokens to be merged.

    Of four tokens let 1 be the destination, and 3, 2, 0 the sources in the order of their likeness to it.
    With r = 1 the merged tokens are 2, 0, and 1 with 3:

        assignment  [1, 2, 0, 2]    token 0 is in row 1, tokens 1 and 3 are in row 2, token 2 is in row 0
        members     [2, 0, 1, 3]    the tokens of row 0, of row 1, of row 2
        offsets     [0, 1, 2, 4]    where each row begins in that
        weights     [1, 1, 1/2, 1/2]
    """
    order, match, src, dst = ranking
    (batch, sources), targets = order.shape, dst.numel()
    kept = sources - min(r, sources)  # sources that stay tokens of their own; destinations come after them

    rows = torch.arange(batch * (kept + targets) + 1, dtype=torch.int32, device=order.device)
    merged = rows[:-1].view(batch, -1)
    of_sources = merged[:, kept:].gather(1, match)
    if kept:
        of_sources.scatter_(1, order[:, sources - kept :], merged[:, :kept])
    assignment = torch.empty(batch, sources + targets, dtype=torch.int32, device=order.device)
    assignment.scatter_(1, src.expand(batch, -1), of_sources)  # not index_copy_, which MPS lacks
    assignment.scatter_(1, dst.expand(batch, -1), merged[:, kept:])
    # Sorting, not counting with atomics: the same order of summation, and so the same bits, in every call.
    ordered, members = assignment.flatten().sort(stable=True)
    offsets = torch.searchsorted(ordered, rows)
    weights = None
    if dtype not in _HALF:
        weights = (offsets[1:] - offsets[:-1]).to(dtype).reciprocal().index_select(0, ordered)
    return MergeMap(assignment.flatten(), members, offsets, weights)


def join(first: MergeMap, second: MergeMap) -> tuple[MergeMap, MergeMap, MergeMap]:
    """Two maps of the same tokens as one, for a single pass of `merge_rows`, and both as views of that one.

    The rows of the first come first; the second loses its way back.
    """
    tokens, rows = first.members.numel(), first.offsets.numel()
    members = torch.cat([first.members, second.members])
    offsets = torch.cat([first.offsets, second.offsets[1:] + tokens])
    weights, parts = None, (first.weights, second.weights)
    if first.weights is not None and second.weights is not None:
        weights = torch.cat([first.weights, second.weights])
        parts = weights[:tokens], weights[tokens:]
    # Not by _replace: torch 2.11 can't keep what it makes beyond a compiled graph.
    joined = MergeMap(first.assignment, members, offsets, weights)
    first = MergeMap(first.assignment, members[:tokens], offsets[:rows], parts[0])
    second = MergeMap(members[:0], members[tokens:], second.offsets, parts[1])
    return joined, first, second


def merge_rows(x: Tensor, merge_map: MergeMap) -> Tensor:
    """Tokens (B, N, C) -> (rows, C), one for each merged token: the mean of its members.

    Sums are taken in float32 where `x` is of half precision.
    """
    rows = x.reshape(-1, x.shape[2])
    if x.device.type == "mps":  # its embedding_bag is missing, which a compiled graph would see too late
        return _add_rows(rows, merge_map)
    _, members, offsets, weights = merge_map
    try:
        if weights is None or x.dtype in _HALF:
            return embedding_bag(members, rows, offsets, mode="mean", include_last_offset=True)
        weights = weights.to(x.dtype)  # a weighted sum is twice as fast on a CPU as the mean
        return embedding_bag(
            members, rows, offsets, mode="sum", per_sample_weights=weights, include_last_offset=True
        )
    except NotImplementedError:  # other devices lack it, too
        return _add_rows(rows, merge_map)


def _add_rows(rows: Tensor, merge_map: MergeMap) -> Tensor:
    """The same without embedding_bag: members are added to the row that they are merged into."""
    members, offsets = merge_map.members, merge_map.offsets
    places = torch.arange(members.numel(), dtype=offsets.dtype, device=offsets.device)
    into = torch.searchsorted(offsets, places, right=True) - 1
    precise = torch.promote_types(rows.dtype, torch.float32)
    sums = torch.zeros(offsets.numel() - 1, rows.shape[1], dtype=precise, device=rows.device)
    sums = sums.index_add(0, into, rows.index_select(0, members).to(precise))
    return (sums / offsets.diff()[:, None]).to(rows.dtype)


def merge(x: Tensor, merge_map: MergeMap) -> Tensor:
    """Tokens (B, N, C) -> (B, N-r, C): each destination becomes the mean of itself and what joins it."""
    return merge_rows(x, merge_map).view(x.shape[0], -1, x.shape[2])


def unmerge(x: Tensor, merge_map: MergeMap) -> Tensor:
    """Merged tokens (B, N-r, C) -> (B, N, C): a merged token gets its destination's value."""
    batch, _, channels = x.shape
    return x.reshape(-1, channels).index_select(0, merge_map.assignment).view(batch, -1, channels)
