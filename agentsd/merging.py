"""Apply a ranking: merge tokens into their destinations, and copy them back (ToMeSD, section 3)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .matching import Ranking


class Cut(NamedTuple):
    """Where each token goes when the first `r` sources of a ranking are merged.

    Merged tokens stand in the order: sources that stay (N-n-r), then destinations (n). Rows count through
    the batch (row = image * tokens + token), so that every move is one flat index operation.

    Attributes:
        kept: (B * (N-n-r),) rows of the sources that stay.
        gone: (B * r,) rows of the sources that are merged.
        into: (B * r,) which of the B*n destinations each of them joins.
        dst: (B * n,) rows of the destinations.
        home: (B * N,) row, among the B*(N-r) merged tokens, of each token's value.
    """

    kept: Tensor
    gone: Tensor
    into: Tensor
    dst: Tensor
    home: Tensor


def cut_ranking(ranking: Ranking, r: int) -> Cut:
    """Merge the `r` best-matched sources, at most all of them."""
    src, match, dst = ranking
    (batch, sources), targets = src.shape, dst.numel()
    r = min(r, sources)
    kept, tokens = sources - r, sources + targets
    merged = kept + targets

    image = torch.arange(batch, device=src.device)[:, None]
    slots = torch.arange(merged, device=src.device).expand(batch, merged)
    home = torch.empty(batch, tokens, dtype=torch.int64, device=src.device)
    home.scatter_(1, src, torch.cat([kept + match[:, :r], slots[:, :kept]], dim=1))
    home.index_copy_(1, dst, slots[:, kept:])
    return Cut(
        kept=(src[:, r:] + image * tokens).flatten(),
        gone=(src[:, :r] + image * tokens).flatten(),
        into=(match[:, :r] + image * targets).flatten(),
        dst=(dst + image * tokens).flatten(),
        home=(home + image * merged).flatten(),
    )


def merge(x: Tensor, cut: Cut) -> Tensor:
    """Tokens (B, N, C) -> (B, N-r, C): each destination becomes the mean of itself and what joins it.

    Sums are taken in float32 where `x` is of half precision.
    """
    batch, _, channels = x.shape
    rows = x.reshape(-1, channels)
    total = rows.index_select(0, cut.dst)
    count = torch.ones(total.shape[0], 1, dtype=torch.float32, device=x.device)
    acc = torch.promote_types(x.dtype, torch.float32)
    total = _add_rows(total.to(acc), cut.into, rows.index_select(0, cut.gone).to(acc))
    count = _add_rows(count, cut.into, count.new_ones(cut.into.shape[0], 1))
    mean = (total / count).to(x.dtype).view(batch, -1, channels)
    kept = rows.index_select(0, cut.kept).view(batch, -1, channels)
    return torch.cat([kept, mean], dim=1)


def unmerge(x: Tensor, cut: Cut) -> Tensor:
    """Merged tokens (B, N-r, C) -> (B, N, C): a merged token gets its destination's value."""
    batch, _, channels = x.shape
    return x.reshape(-1, channels).index_select(0, cut.home).view(batch, -1, channels)


def _add_rows(x: Tensor, index: Tensor, rows: Tensor) -> Tensor:
    """`x[index] += rows`, with equal bits in every call."""
    if x.is_cuda:  # index_add uses atomics there; an accumulating index_put sorts first
        return x.index_put((index,), rows, accumulate=True)
    return x.index_add(0, index, rows)
