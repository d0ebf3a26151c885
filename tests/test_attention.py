"""Eq. 9 of Agent Attention, with AgentSD's `k` and `scale`."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentsd.attention.formula import agent_attention


def loop(query, key, value, agent, k, scale):
    """Eq. 9, one number at a time, in float64."""
    d = len(query[0])

    def softmax(row):
        top = max(row)
        parts = [math.exp(x - top) for x in row]
        return [p / sum(parts) for p in parts]

    def dot(a, b):
        return sum(x * y for x, y in zip(a, b, strict=True))

    def mix(weights, rows):
        return [sum(w * row[c] for w, row in zip(weights, rows, strict=True)) for c in range(len(rows[0]))]

    gathered = [mix(softmax([dot(a, x) * d**-0.5 for x in key]), value) for a in agent]
    out = [mix(softmax([dot(q, a) * d**scale for a in agent]), gathered) for q in query]
    return [
        [o + k * v for o, v in zip(row, v_row, strict=True)] for row, v_row in zip(out, value, strict=True)
    ]


@pytest.mark.parametrize(("k", "scale"), [(0.075, -0.15), (0.0, -0.5), (1.5, 0.0)])
def test_equation_9_against_a_float64_loop(k, scale):
    rng = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 2, 2, 7, 5, generator=rng, dtype=torch.float64)
    agent = torch.randn(2, 2, 3, 5, generator=rng, dtype=torch.float64)
    expected = [
        [loop(*(x[b, h].tolist() for x in (query, key, value, agent)), k, scale) for h in range(2)]
        for b in range(2)
    ]
    expected = torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(
        agent_attention(query, key, value, agent, k, scale), expected, rtol=0, atol=1e-12
    )
    singles = (x.float() for x in (query, key, value, agent))
    torch.testing.assert_close(agent_attention(*singles, k, scale).double(), expected, rtol=0, atol=2e-6)


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 30),
    agents=st.integers(1, 9),
    width=st.integers(1, 12),
    size=st.sampled_from([0.0, 1.0, 1e4]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    scale=st.floats(-2, 0),
    k=st.floats(0, 2),
)
def test_finite_in_finite_out(n, agents, width, size, dtype, scale, k):
    rng = torch.Generator().manual_seed(n)
    query, key, value = (size * torch.randn(3, 1, 2, n, width, generator=rng)).to(dtype)
    agent = (size * torch.randn(1, 2, agents, width, generator=rng)).to(dtype)
    out = agent_attention(query, key, value, agent, k, scale)
    assert out.shape == query.shape
    assert out.isfinite().all()
    # a weighted mean of values, and k of the own value
    bound = (1 + k) * value.abs().max().double()
    assert out.abs().max().double() <= bound * 1.02 + 1e-6
