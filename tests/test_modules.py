import math
from functools import partial
from itertools import product

import pytest
import torch

from agentsd.attention.formula import agent_attention
from agentsd.attention.pooling import agent_grid, pool_agents
from agentsd.modules import (
    AgentAttention,
    AgentModule,
    AttnZero,
    AttnZeroAttention,
    FocusedLinear,
    FocusedLinearAttention,
    attnzero_attention,
    focused_attention,
)
from agentsd.modules.agent import resize_agents

HEADS, DIM, GRID = 2, 3, (4, 5)
CORES = {"agent": AgentAttention, "focused": FocusedLinearAttention, "attnzero": AttnZeroAttention}
SETTINGS = {"agent": {"grid": GRID, "agents": 6, "block_size": 3}, "focused": {}, "attnzero": {}}


def qkv(height=4, width=5, dtype=torch.float64, batch=2):
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(3, batch, HEADS, height * width, DIM, generator=rng, dtype=torch.float64)
    return [part.to(dtype) for part in x]


def core(kind, dtype=torch.float64, **settings):
    """A core whose parameters all differ from their first values."""
    module = CORES[kind](HEADS, DIM, **(SETTINGS[kind] | settings)).to(dtype)
    rng = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=rng, dtype=torch.float64))
    return module


def convolved(module, value, height, width):
    """The depthwise convolution as a sum over its taps of shifted grids."""
    weight, bias = module.convolution.conv.weight, module.convolution.conv.bias
    side, grid = weight.shape[-1], value.unflatten(2, (height, width))
    padded = torch.nn.functional.pad(grid, (0, 0, *[side // 2] * 4))
    out = bias.view(HEADS, 1, 1, DIM).expand_as(grid).clone()
    for y, x in product(range(side), range(side)):
        out += weight[:, 0, y, x].view(HEADS, 1, 1, DIM) * padded[:, :, y : y + height, x : x + width]
    return out.flatten(2, 3)


def pooled(tokens, height, width, rows, cols):
    """The mean of each window, from the floor of its first to the ceiling of its last border."""
    grid, out = tokens.unflatten(2, (height, width)), []
    for r, c in product(range(rows), range(cols)):
        top, left = r * height // rows, c * width // cols
        bottom, right = math.ceil((r + 1) * height / rows), math.ceil((c + 1) * width / cols)
        out.append(grid[:, :, top:bottom, left:right].mean((2, 3)))
    return torch.stack(out, 2)


def resizing(size, length):
    """(size, length) weights of linear interpolation between cell centres, flat beyond the outer ones."""
    places = [min(max((i + 0.5) * length / size - 0.5, 0), length - 1) for i in range(size)]
    weights = [[max(0, 1 - abs(at - j)) for j in range(length)] for at in places]
    return torch.tensor(weights, dtype=torch.float64)


def bias_table(bias, height, width):
    """(heads, n, N): the row, the column and the block part, summed."""
    row = torch.einsum("yi,hnik->hny", resizing(height, bias.row.shape[2]), bias.row)
    column = torch.einsum("xi,hnki->hnx", resizing(width, bias.column.shape[3]), bias.column)
    side = bias.block.shape[2]
    block = torch.einsum("yi,xj,hnij->hnyx", resizing(height, side), resizing(width, side), bias.block)
    cells = product(range(height), range(width))
    return torch.stack([row[:, :, y] + column[:, :, x] + block[:, :, y, x] for y, x in cells], 2)


def agent_oracle(module, query, key, value, height, width):
    agents = pooled(query, height, width, module.rows, module.cols)
    b1, b2 = (bias_table(b, height, width) for b in (module.gather_bias, module.broadcast_bias))
    gather = (torch.einsum("bhnd,bhtd->bhnt", agents, key) * DIM**-0.5 + b1).exp()
    spread = (torch.einsum("bhtd,bhnd->bhtn", query, agents) * DIM**module.scale + b2.mT).exp()
    spread, gather = (weights / weights.sum(3, keepdim=True) for weights in (spread, gather))
    weights = torch.einsum("bhtn,bhns->bhts", spread, gather)
    return weights @ value + convolved(module, value, height, width)


def focused_oracle(module, query, key, value, height, width):
    def phi(x):
        x = (x * module.log_scale.exp()).clamp(min=0)
        return x.norm(dim=3, keepdim=True) * torch.nan_to_num(x**3 / (x**3).norm(dim=3, keepdim=True))

    similarity = torch.einsum("bhtd,bhsd->bhts", phi(query), phi(key))  # the N x N that the core avoids
    weights = torch.nan_to_num(similarity / similarity.sum(3, keepdim=True))
    return weights @ value + convolved(module, value, height, width)


def attnzero_oracle(module, query, key, value, height, width):
    out = torch.empty_like(query)
    for index in product(range(len(query)), range(HEADS)):
        q, k, v = query[index], key[index], value[index]
        v = (v - v.min()) / (v.max() - v.min())
        context = sum(torch.where(row > 0, row + 1, row.exp()).outer(x) for row, x in zip(k, v, strict=True))
        context = torch.stack([row / row.norm() for row in context])
        mixed = [row / row.norm() @ context for row in q]
        out[index] = torch.stack([row * m / m.norm() for row, m in zip(q, mixed, strict=True)])
    return out


ORACLES = {"agent": agent_oracle, "focused": focused_oracle, "attnzero": attnzero_oracle}


@pytest.mark.parametrize(("height", "width"), [GRID, (7, 3)])
@pytest.mark.parametrize("kind", CORES)
def test_each_core_is_its_formula(kind, height, width):
    """At the grid it was made for, and at a taller and narrower one."""
    module, inputs = core(kind), qkv(height, width)
    expected = ORACLES[kind](module, *inputs, height, width).detach()
    torch.testing.assert_close(module(*inputs, height, width), expected, rtol=0, atol=1e-11)
    singles = module.float()(*(x.float() for x in inputs), height, width)
    torch.testing.assert_close(singles.double(), expected, rtol=1e-4, atol=1e-4)


def test_a_new_agent_core_is_the_training_free_form():
    dtype, k = torch.float32, 0.075
    query, key, value = qkv(8, 12, dtype)
    agents = pool_agents(query, 8, 12, *agent_grid(9, 8, 12))
    expected = agent_attention(query, key, value, agents, k, -0.15)
    settings = {"grid": (8, 12), "agents": 9, "scale": -0.15, "k": k}
    for bias, convolution in product((True, False), repeat=2):
        module = AgentAttention(HEADS, DIM, bias=bias, convolution=convolution, **settings).to(dtype)
        out = module(query, key, value, 8, 12)
        roundings = 20 * bias + convolution  # `k V` in one pass with the sum, or as a convolution
        torch.testing.assert_close(out, expected, rtol=0, atol=roundings * torch.finfo(dtype).eps)
        assert [module.gather_bias is not None, module.broadcast_bias is not None] == [bias, bias]
        assert (module.convolution is not None) == convolution


def test_agent_grids_and_pooling():
    grids = {(49, 64, 64): (7, 7), (256, 64, 64): (16, 16), (15, 64, 64): (4, 3), (49, 2, 200): (1, 49),
             (99, 4, 5): (4, 5), (256, 96, 64): (19, 13), (1, 9, 9): (1, 1)}  # fmt: skip
    assert {given: agent_grid(*given) for given in grids} == grids
    given = (qkv(7, 5)[0], 7, 5, 3, 2)
    torch.testing.assert_close(pool_agents(*given), pooled(*given), rtol=0, atol=1e-15)


@pytest.mark.parametrize(("dtype", "size"), [(torch.float16, 300), (torch.float32, 1e5), (torch.float32, 0)])
@pytest.mark.parametrize("kind", CORES)
def test_large_and_absent_features_stay_finite(kind, dtype, size):
    """Forward and backward; values stay moderate, since an average of them must fit."""
    module, sizes = core(kind, dtype), (size, size, min(size, 1))
    inputs = [(x * by).requires_grad_() for x, by in zip(qkv(16, 16, dtype), sizes, strict=True)]
    out = module(*inputs, 16, 16)
    out.float().square().mean().backward()
    assert out.dtype == dtype
    assert all(x.isfinite().all() for x in (out, *(leaf.grad for leaf in (*inputs, *module.parameters()))))


@pytest.mark.parametrize(
    ("kind", "function"), [("focused", partial(focused_attention, p=3)), ("attnzero", attnzero_attention)]
)
def test_linear_cores_compute_in_single_precision(kind, function):
    settings = {"convolution": False} if kind == "focused" else {}
    inputs, module = [30 * x for x in qkv(dtype=torch.bfloat16)], CORES[kind](HEADS, DIM, **settings)
    expected = function(*(x.float() for x in inputs)).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(module(*inputs, *GRID), expected)
    assert torch.equal(module.bfloat16()(*inputs, *GRID), expected)


def test_errors_name_the_numbers():
    for kind in CORES:
        module, (query, key, value) = core(kind), qkv()
        with pytest.raises(ValueError, match=r"got \(2, 2, 20, 3\), need \(B, heads=2, N=24, head_dim=3\)"):
            module(query, key, value, 4, 6)
        with pytest.raises(ValueError, match=r"got \(2, 2, 19, 3\).*N=20"):
            module(query, key[:, :, :-1], value, *GRID)
    with pytest.raises(ValueError, match="kernel_size=4: pass an odd one"):
        FocusedLinearAttention(HEADS, DIM, kernel_size=4)
    with pytest.raises(ValueError, match="agents=0, grid 4 x 5: pass 1 or more"):
        AgentAttention(HEADS, DIM, grid=GRID, agents=0)


def test_operators_build_the_cores_that_their_settings_say():
    built = AgentModule(bias=False, count=6, k=0.5, scale=-0.3).build(HEADS, DIM, GRID)
    assert isinstance(built, AgentAttention)
    assert (built.rows * built.cols, built.k, built.scale, built.gather_bias) == (6, 0.5, -0.3, None)
    cells = AgentModule(convolution=False).build(HEADS, DIM, (16, 8))  # one agent for each 4 x 4 tokens
    assert (cells.rows, cells.cols, cells.convolution) == (4, 2, None)
    assert cells.gather_bias.row.shape == (HEADS, 8, 16, 1)
    assert AgentModule().build(HEADS, DIM, (3, 3)).rows == 1
    assert FocusedLinear(convolution=False).build(HEADS, DIM, GRID).convolution is None
    assert isinstance(AttnZero().build(HEADS, DIM, GRID), AttnZeroAttention)


@pytest.mark.parametrize(("old", "new"), [(9, 25), (25, 9)])
def test_agent_biases_are_resized_to_other_agents(old, new):
    """The oracle is torch's interpolation of one plane at a time."""
    grid = (8, 8)
    small, large = (AgentAttention(2, 4, grid=grid, agents=n, from_scratch=True) for n in (old, new))
    for part in (small.gather_bias.row, small.gather_bias.column, small.gather_bias.block):
        made = resize_agents(part, grid, (large.rows, large.cols))
        assert made.shape == (2, large.rows * large.cols, *part.shape[2:])
        for head, y, x in ((0, 0, 0), (1, part.shape[2] - 1, part.shape[3] - 1)):
            plane = part[head, :, y, x].view(1, 1, small.rows, small.cols)
            expected = torch.nn.functional.interpolate(
                plane, size=(large.rows, large.cols), mode="bilinear"
            ).flatten()
            torch.testing.assert_close(made[head, :, y, x], expected)
