"""Eq. 9 of Agent Attention, with AgentSD's `k` and `scale`."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentsd.attention.formula import agent_attention


@pytest.mark.parametrize(("k", "scale"), [(0.075, -0.15), (0.0, -0.5), (1.5, 0.0)])
def test_equation_9_by_hand(k, scale):
    """One query at a time, in float64."""
    rng = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 2, 2, 7, 5, generator=rng, dtype=torch.float64)
    agent = torch.randn(2, 2, 3, 5, generator=rng, dtype=torch.float64)
    expected = torch.empty_like(query)
    for b, h, i in itertools.product(range(2), range(2), range(7)):
        gathered = [(key[b, h] @ a / 5**0.5).softmax(0) @ value[b, h] for a in agent[b, h]]
        weights = (agent[b, h] @ query[b, h, i] * 5**scale).exp()
        expected[b, h, i] = weights / weights.sum() @ torch.stack(gathered) + k * value[b, h, i]
    inputs = query, key, value, agent
    torch.testing.assert_close(agent_attention(*inputs, k, scale), expected, rtol=0, atol=1e-12)
    singles = (x.float() for x in inputs)
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
