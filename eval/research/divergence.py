"""The redundancy score of attention: the mean Jensen-Shannon divergence of its rows.

Source: Pu et al., "Efficient Diffusion Transformer with Step-wise Dynamic Attention Mediators", 2024, whose
natural logarithm is kept.
"""

import math

import torch
from torch import Tensor

MAX_SCORE = math.log(2)
"""Nats; the score where no two queries look at the same key."""
_FIRST_SCALE = 2.0**-10
_LAST_SCALE = 2.0**20  # times the number of keys
_BLOCK = 2**22  # entries of attention worked on at once
_CACHED = 2**16  # as many as stay in a processor's cache: several times faster


def js_score(attention: Tensor) -> float:
    """Return the mean divergence over all pairs of rows and all heads, in nats, from 0 to ln 2 (Eq. 6).

    `attention` is (M, N, K) of M heads, N > 1 queries, K keys; its rows sum to 1. Float32 is enough for an
    error below 1e-6. The cost is O(NK) a head rather than O(NNK): with x ln x = int_0^inf [exp(-xt) - 1 +
    x (1 - exp(-t))] dt/t^2 and t = 2s, the divergence of two rows p and q is

        JS(p, q) = 1/2 int_0^inf sum_k 1/2 [exp(-p_k s) - exp(-q_k s)]^2 ds/s^2,

    and the mean of 1/2 (u_i - u_j)^2 over all pairs is the unbiased variance of u. What is left is an
    integral over one number.
    """
    _, rows, keys = attention.shape
    width = max(1, (_CACHED if attention.device.type == "cpu" else _BLOCK) // rows)
    blocks = [block for head in attention for block in head.split(width, dim=1)]
    return sum(_integral(block, keys) for block in blocks) / len(attention)


def _integral(block: Tensor, keys: int) -> float:
    """The part of Eq. 6 that some columns of a head's attention, (N, k) of all (N, K), have in it.

    The trapezoid rule in log2(s), within 3e-7 as the integrand is analytic; from one node to the next,
    exp(-ps) is only squared.
    """
    scale = _FIRST_SCALE
    fall = torch.expm1(block * -scale)  # exp(-ps) itself, near 1, would lose its digits
    terms, scales = [], []
    while scale <= _LAST_SCALE * keys:  # beyond, at most K / (8 scale) is left
        terms.append((fall - fall.mean(0)).square_().sum())
        scales.append(scale)
        fall = fall * (fall + 2)
        scale *= 2
    weights = torch.tensor(scales, device="cpu").double() * (len(block) - 1)
    integrand = torch.stack(terms).cpu().double() / weights
    # Below the first scale each term is half the one above it: together they are the first term again.
    return float(integrand.sum() + integrand[0]) * math.log(2) / 2


def js_score_sampled(
    query: Tensor, key: Tensor, pairs: int, generator: torch.Generator
) -> tuple[float, float]:
    """Return an unbiased estimate of `js_score` and its standard error, both in nats.

    `query` (M, N, d), N > 1, already has the softmax's scale in it; `key` is (M, K, d). `pairs` are drawn in
    all, spread evenly over the heads (at least 2 each), by a generator on the CPU: every device has the same
    ones. The N x K matrix is never made.
    """
    heads, tokens, _ = query.shape
    drawn = max(2, math.ceil(pairs / heads))
    block = max(1, _BLOCK // key.shape[1])
    mean, variance = 0.0, 0.0
    for q, k in zip(query, key, strict=True):
        first = torch.randint(tokens, (drawn,), generator=generator, device="cpu")
        second = (first + torch.randint(1, tokens, (drawn,), generator=generator, device="cpu")) % tokens
        blocks = zip(first.split(block), second.split(block), strict=True)
        values = torch.cat([_js(attention_map(q[i], k), attention_map(q[j], k)) for i, j in blocks])
        values = values.cpu().double()
        mean += float(values.mean()) / heads
        variance += float(values.var()) / drawn / heads**2
    return mean, math.sqrt(variance)


def attention_map(query: Tensor, key: Tensor) -> Tensor:
    """Return softmax(q k^T), (..., N, K), for `query` (..., N, d) with its scale in it (Eq. 2)."""
    return (query @ key.transpose(-1, -2)).softmax(-1)


def _js(first: Tensor, second: Tensor) -> Tensor:
    """The divergence of each row of `first` (n, K) from the same row of `second`: (n,) (Eq. 5)."""
    entropies = [torch.special.entr(p).sum(-1) for p in ((first + second) / 2, first, second)]
    return (entropies[0] - (entropies[1] + entropies[2]) / 2).clamp(min=0)  # rounding can go below
