"""The attention that AttnZero's search found (ECCV 2024, supplement, section 3.2, Eq. 1)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import elu, normalize

from .grid import check_tokens, widen


def min_max(x: Tensor) -> Tensor:
    """eta_1: (..., N, d) scaled to [0, 1] over the last two axes; a constant matrix gives zeros."""
    low, high = x.amin((-2, -1), keepdim=True), x.amax((-2, -1), keepdim=True)
    return (x - low) / (high - low).clamp(min=1e-6)


def attnzero_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """`Q * eta_2(eta_2(Q) eta_2(phi_1(K)^T eta_1(V)))`: (B, heads, N, d) each -> (B, heads, N, d).

    What Eq. 1 leaves open, and what was chosen:
        the outer product: elementwise, the one that keeps the shape and the stated O(N d);
        phi_1: ELU plus 1, as in the paper's table of operations, so that weights are positive;
        eta_1 (min-max): over each head's whole (N, d) matrix, as its formula is written;
        eta_2 (L2): over the last axis, so that tokens and key channels become unit vectors.

    The scale and offset of V cancel, the size of the output is that of Q. Computed in float32 or wider.
    """
    dtype = query.dtype
    # the sum over tokens exceeds float16, so not under a caller's autocast either
    with torch.autocast(query.device.type, enabled=False):
        query, key, value = (widen(x) for x in (query, key, value))
        context = normalize((elu(key) + 1).mT @ min_max(value), dim=-1)
        return (query * normalize(normalize(query, dim=-1) @ context, dim=-1)).to(dtype)


class AttnZeroAttention(nn.Module):
    """`attnzero_attention` with the other modules' signature; it has no parameters."""

    def __init__(self, heads: int, head_dim: int) -> None:
        super().__init__()
        self.heads, self.head_dim = heads, head_dim

    def reset(self, generator: torch.Generator | None = None) -> None:
        """Nothing is drawn."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, height: int, width: int) -> Tensor:
        """(B, heads, N, d) each -> (B, heads, N, d), N = height * width; ValueError for another N."""
        check_tokens(self.heads, self.head_dim, height, width, query, key, value)
        return attnzero_attention(query, key, value)
