"""Agent attention, Eq. 9 of "Agent Attention" (ECCV 2024), on fused attention kernels."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def agent_attention(
    query: Tensor, key: Tensor, value: Tensor, agent: Tensor, k: float, scale: float
) -> Tensor:
    """The method, 3 of 3: `softmax(d**scale * Q A^T) softmax(d**-0.5 * A K^T) V + k V`, for each head.

    Args:
        query, key, value: (B, heads, N, d).
        agent: (B, heads, n, d) agent tokens, projected as queries.
        k: weight of the residual `k V`.
        scale: exponent of the head width `d` in the broadcast softmax; the paper's is -0.15.

    Returns:
        (B, heads, N, d).
    """
    width = query.shape[-1]
    gathered = scaled_dot_product_attention(agent, key, value, scale=width**-0.5)
    broadcast = scaled_dot_product_attention(query, agent, gathered, scale=width**scale)
    return torch.add(broadcast, value, alpha=k)  # one pass; `broadcast + k * value` writes a product as well
