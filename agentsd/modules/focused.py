"""Focused linear attention of "FLatten Transformer" (ICCV 2023): Eq. 4, 5, 6, 10 and 12."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import relu

from .grid import GridConvolution, check_tokens, widen


def focused_map(x: Tensor, p: float) -> Tensor:
    """`phi_p(x) = f_p(ReLU(x))`, `f_p(x) = |x| / |x**p| * x**p` over the last axis (Eq. 6).

    In float32 or wider. Where no entry of x is positive the result is zero.
    """
    x = relu(widen(x))
    # f_p(x / c) = f_p(x) / c: with 1 as the largest entry no power overflows, and |x**p| is at least 1
    peak = x.amax(-1, keepdim=True).detach().clamp(min=torch.finfo(x.dtype).tiny)
    x = x / peak
    powers = x**p
    before, after = (torch.linalg.vector_norm(y, dim=-1, keepdim=True) for y in (x, powers))
    return peak * before / after.clamp(min=1) * powers


def focused_attention(query: Tensor, key: Tensor, value: Tensor, p: float, eps: float = 1e-6) -> Tensor:
    """`phi_p(Q) (phi_p(K)^T V)`, each token divided by the sum of its weights (Eq. 4): linear in N.

    Args:
        query, key, value: (B, heads, N, d).
        p: power of the focused map.
        eps: the least mean weight that a token is divided by.

    Returns:
        (B, heads, N, d), computed in float32 or wider and returned in the dtype of `value`.
    """
    # products of focused features exceed float16, so not under a caller's autocast either
    with torch.autocast(query.device.type, enabled=False):
        query, key, values = focused_map(query, p), focused_map(key, p), widen(value)
        # a mean above and below the line, not a sum, so that `eps` means the same at every N
        context = key.mT @ values / key.shape[-2]
        weight = query @ key.mean(-2, keepdim=True).mT
        return (query @ context / weight.clamp(min=eps)).to(value.dtype)


class FocusedLinearAttention(nn.Module):
    """`phi_p(Q) phi_p(K)^T V + DWC(V)`, normalised (Eq. 12), on any token grid.

    Before the map the queries and keys are multiplied by a learned positive scale, one number for each
    channel of each head, 1 at first (not in the paper's text).

    Args:
        heads, head_dim: number and width of the heads.
        p: power of the focused map.
        kernel_size: side of the convolution, odd.
        convolution: whether there is one (Table 4).
    """

    def __init__(
        self, heads: int, head_dim: int, *, p: float = 3, kernel_size: int = 5, convolution: bool = True
    ) -> None:
        super().__init__()
        self.heads, self.head_dim, self.p = heads, head_dim, p
        self.log_scale = nn.Parameter(torch.zeros(heads, 1, head_dim))
        self.convolution = GridConvolution(heads, head_dim, kernel_size) if convolution else None

    def reset(self, generator: torch.Generator | None = None) -> None:
        """Start untrained."""
        nn.init.zeros_(self.log_scale)
        if self.convolution is not None:
            self.convolution.reset(generator)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, height: int, width: int) -> Tensor:
        """(B, heads, N, d) each -> (B, heads, N, d), N = height * width; ValueError for another N."""
        check_tokens(self.heads, self.head_dim, height, width, query, key, value)
        scale = self.log_scale.exp()
        out = focused_attention(query * scale, key * scale, value, self.p)
        return out if self.convolution is None else out + self.convolution(value, height, width)
