"""Apply a ranking: merge tokens into their destinations, and copy them back (ToMeSD, section 3)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from .matching import Ranking


class Cut(NamedTuple):
    """Which tokens form each merged token, when the first `r` sources of a ranking are merged.

    Merged tokens stand in the order: sources that stay (N-n-r), then destinations (n). Rows count through
    the batch (row = image * tokens + token), so that every move is one flat index operation. All are int32:
    a cut may live as long as the model call.

    Attributes:
        home: (B * N,) row of the merged token that each token is in.
        members: (B * N,) rows of the tokens, those of one merged token side by side.
        starts: (B * (N-r),) where in `members` each merged token's rows begin.
        size: (B * N,) how many tokens are in each member's merged token.
    """

    home: Tensor
    members: Tensor
    starts: Tensor
    size: Tensor


def cut_ranking(ranking: Ranking, r: int) -> Cut:
    """Merge the `r` best-matched sources, at most all of them."""
    src, match, dst = ranking
    (batch, sources), targets = src.shape, dst.numel()
    r = min(r, sources)
    kept = sources - r
    tokens, merged = sources + targets, kept + targets

    slots = torch.arange(batch * merged, device=src.device).view(batch, merged)
    home = torch.empty(batch, tokens, dtype=torch.int64, device=src.device)
    home.scatter_(1, src, torch.cat([slots[:, kept:].gather(1, match[:, :r]), slots[:, :kept]], dim=1))
    home.index_copy_(1, dst, slots[:, kept:])
    home = home.flatten()
    # Sorting, not counting with atomics: the same order of summation, and so the same bits, in every call.
    rows, members = home.sort(stable=True)
    starts = torch.searchsorted(rows, slots.flatten())
    size = starts.diff(append=starts.new_tensor([rows.numel()]))
    return Cut(*(index.int() for index in (home, members, starts, size[rows])))


def merge(x: Tensor, cut: Cut) -> Tensor:
    """Tokens (B, N, C) -> (B, N-r, C): each destination becomes the mean of itself and what joins it.

    Sums are taken in float32 where `x` is of half precision.
    """
    batch, _, channels = x.shape
    rows = x.reshape(-1, channels)
    if x.dtype in (torch.float16, torch.bfloat16):  # a weight would be rounded to half precision
        mean = embedding_bag(cut.members, rows, cut.starts, mode="mean")
    else:
        share = cut.size.to(x.dtype).reciprocal()
        mean = embedding_bag(cut.members, rows, cut.starts, mode="sum", per_sample_weights=share)
    return mean.view(batch, -1, channels)


def unmerge(x: Tensor, cut: Cut) -> Tensor:
    """Merged tokens (B, N-r, C) -> (B, N, C): a merged token gets its destination's value."""
    batch, _, channels = x.shape
    return x.reshape(-1, channels).index_select(0, cut.home).view(batch, -1, channels)
