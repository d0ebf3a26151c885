"""Apply a ranking: merge tokens into their destinations, and copy them back (ToMeSD, section 3)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from .matching import Ranking

_HALF = (torch.float16, torch.bfloat16)  # a weight would be rounded to that


class Cut(NamedTuple):
    """Which tokens form each merged token, when the first `r` sources of a ranking are merged.

    Merged tokens stand in the order: sources that stay (N-n-r), then destinations (n). Rows count through
    the batch (row = image * tokens + token), so that every move is one flat index operation.

    A second cut of the same ranking may follow in `members`, `edges` and `share`: one pass then forms both.

    Attributes:
        home: (B * N,) row of the merged token that each token is in.
        members: (B * N,) rows of the tokens, those of one merged token side by side.
        edges: (B * (N-r) + 1,) where in `members` each merged token's rows begin, and their end.
        share: (B * N,) weight of each member in its merged token's mean; None takes the mean as it comes.
    """

    home: Tensor
    members: Tensor
    edges: Tensor
    share: Tensor | None


def cut_ranking(
    ranking: Ranking, r: int, dtype: torch.dtype = torch.float32, further: int | None = None
) -> Cut:
    """Merge the `r` best-matched sources, at most all of them; `dtype` is that of the tokens to be merged.

    A second cut, which merges `further` sources, follows where that is given.
    """
    order, match, src, dst = ranking
    (batch, sources), targets = order.shape, dst.numel()
    kept = [sources - min(n, sources) for n in ((r,) if further is None else (r, further))]
    sizes = [batch * (n + targets) for n in kept]

    rows = torch.arange(sum(sizes) + 1, dtype=torch.int32, device=order.device)
    slots = [part.view(batch, -1) for part in rows[:-1].split(sizes)]
    ends = [part[:, n:] for part, n in zip(slots, kept, strict=True)]
    end = ends[0][None] if further is None else torch.stack(ends)
    joined = end.gather(2, match.expand(len(kept), -1, -1))
    for each, part, n in zip(joined, slots, kept, strict=True):
        if n:
            each.scatter_(1, order[:, sources - n :], part[:, :n])
    home = torch.empty(len(kept), batch, sources + targets, dtype=torch.int32, device=order.device)
    home.index_copy_(2, src, joined).index_copy_(2, dst, end)
    # Sorting, not counting with atomics: the same order of summation, and so the same bits, in every call.
    ordered, members = (x.flatten() for x in home.flatten(1).sort(dim=1, stable=True))
    edges = torch.searchsorted(ordered, rows)
    share = None
    if dtype not in _HALF:
        share = (edges[1:] - edges[:-1]).to(dtype).reciprocal().index_select(0, ordered)
    return Cut(home[0].flatten(), members, edges, share)


def first_of(cut: Cut, merged: int) -> Cut:
    """The first cut of two, which has `merged` merged tokens in the batch."""
    tokens = cut.home.numel()
    share = None if cut.share is None else cut.share[:tokens]
    return Cut(cut.home, cut.members[:tokens], cut.edges[: merged + 1], share)


def second_of(cut: Cut, merged: int) -> Cut:
    """The second cut of two, without its way back; the first has `merged` merged tokens in the batch."""
    tokens = cut.home.numel()
    share = None if cut.share is None else cut.share[tokens:]
    return Cut(cut.home[:0], cut.members[tokens:], cut.edges[merged:] - tokens, share)


def of_last(cut: Cut, batch: int, images: int) -> Cut:
    """One cut for the last images of a batch."""
    tokens = cut.members.numel() // batch
    merged, skipped = (cut.edges.numel() - 1) // batch, batch - images
    home = cut.home.view(batch, -1)[skipped:].flatten() - skipped * merged if cut.home.numel() else cut.home
    members, edges = cut.members[skipped * tokens :], cut.edges[skipped * merged :]
    share = None if cut.share is None else cut.share[skipped * tokens :]
    return Cut(home, members - skipped * tokens, edges - skipped * tokens, share)


def together(first: Cut, second: Cut) -> Cut:
    """Two cuts of the same tokens in one; the way back is the first's."""
    share = None
    if first.share is not None and second.share is not None:
        share = torch.cat([first.share, second.share])
    edges = torch.cat([first.edges, second.edges[1:] + first.members.numel()])
    return Cut(first.home, torch.cat([first.members, second.members]), edges, share)


def merge(x: Tensor, cut: Cut) -> Tensor:
    """Tokens (B, N, C) -> (B, N-r, C): each destination becomes the mean of itself and what joins it.

    Sums are taken in float32 where `x` is of half precision. Of two cuts: (1, B * (N-r) + B * (N-s), C), the
    merged tokens of all images and then those of the second cut.
    """
    batch, _, channels = x.shape
    rows = x.reshape(-1, channels)
    if cut.share is None or x.dtype in _HALF:
        mean = embedding_bag(cut.members, rows, cut.edges, mode="mean", include_last_offset=True)
    else:  # twice as fast on a CPU as the mean
        mean = embedding_bag(
            cut.members,
            rows,
            cut.edges,
            mode="sum",
            per_sample_weights=cut.share.to(x.dtype),
            include_last_offset=True,
        )
    two = cut.members.numel() > rows.shape[0]
    return mean.view(1 if two else batch, -1, channels)


def unmerge(x: Tensor, cut: Cut) -> Tensor:
    """Merged tokens (B, N-r, C) -> (B, N, C): a merged token gets its destination's value."""
    batch, _, channels = x.shape
    return x.reshape(-1, channels).index_select(0, cut.home).view(batch, -1, channels)
