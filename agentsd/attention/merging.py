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
    the batch (row = image * tokens + token), so that every move is one flat index operation. All are int32:
    a cut may live as long as the model call.

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


def cut_ranking(ranking: Ranking, r: int, dtype: torch.dtype = torch.float32) -> Cut:
    """Merge the `r` best-matched sources, at most all of them; `dtype` is that of the tokens to be merged."""
    src, match, dst = ranking
    (batch, sources), targets = src.shape, dst.numel()
    r = min(r, sources)
    kept = sources - r
    tokens, merged = sources + targets, kept + targets

    rows = torch.arange(batch * merged + 1, dtype=torch.int32, device=src.device)
    slots = rows[:-1].view(batch, merged)
    joined = slots[:, kept:].gather(1, match[:, :r])
    home = torch.empty(batch, tokens, dtype=torch.int32, device=src.device)
    home.scatter_(1, src, torch.cat([joined, slots[:, :kept]], dim=1) if kept else joined)
    home.index_copy_(1, dst, slots[:, kept:])
    home = home.flatten()
    # Sorting, not counting with atomics: the same order of summation, and so the same bits, in every call.
    ordered, members = home.sort(stable=True)
    edges = torch.searchsorted(ordered, rows, out_int32=True)
    share = None
    if dtype not in _HALF:
        share = (edges[1:] - edges[:-1]).to(dtype).reciprocal().index_select(0, ordered)
    return Cut(home, members.int(), edges, share)


def merge(x: Tensor, cut: Cut) -> Tensor:
    """Tokens (B, N, C) -> (B, N-r, C): each destination becomes the mean of itself and what joins it.

    Sums are taken in float32 where `x` is of half precision.
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
    return mean.view(batch, -1, channels)


def unmerge(x: Tensor, cut: Cut) -> Tensor:
    """Merged tokens (B, N-r, C) -> (B, N, C): a merged token gets its destination's value."""
    batch, _, channels = x.shape
    return x.reshape(-1, channels).index_select(0, cut.home).view(batch, -1, channels)
