"""torch.compile without a graph break. The graph-counting backend runs the traced graph as it is."""

import pytest
import torch
from test_patch import call
from tiny import make_unet
from torch._dynamo.testing import CompileCounter

from agentsd import apply_agentsd, remove_agentsd

STEPS = (999, 800, 700, 400, 100, 1)
SETTINGS = ({"mode": "exact"}, {"mode": "fast"}, {"mode": "turbo"}, {"mode": "fast", "late": "tome"})


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def expected(**settings):
    unet = make_unet()
    apply_agentsd(unet, **settings)
    return [call(unet, t) for t in STEPS]


@pytest.mark.parametrize("order", ["apply, compile", "compile, apply", "in place"])
@pytest.mark.parametrize("settings", SETTINGS)
def test_fullgraph_with_two_graphs_in_a_run(order, settings):
    """No break, one graph a phase, and none for a second run."""
    unet, counter = make_unet(), CompileCounter()
    if order == "compile, apply":
        compiled = torch.compile(unet, fullgraph=True, backend=counter)
        apply_agentsd(compiled, **settings)
    elif order == "apply, compile":
        apply_agentsd(unet, **settings)
        compiled = torch.compile(unet, fullgraph=True, backend=counter)
    else:
        apply_agentsd(unet, **settings)
        unet.compile(fullgraph=True, backend=counter)
        compiled = unet
    for out, reference in zip([call(compiled, t) for t in STEPS], expected(**settings), strict=True):
        torch.testing.assert_close(out, reference, rtol=0, atol=1e-6)
    assert counter.frame_count == 2
    for t in STEPS:
        call(compiled, t)
    assert counter.frame_count == 2


def test_apply_and_remove_on_a_model_that_has_already_run_compiled():
    unet, counter = make_unet(), CompileCounter()
    stock = call(unet)
    compiled = torch.compile(unet, fullgraph=True, backend=counter)
    assert torch.equal(call(compiled), stock)
    apply_agentsd(compiled)
    torch.testing.assert_close(call(compiled), expected()[0], rtol=0, atol=1e-6)
    remove_agentsd(compiled)
    assert torch.equal(call(compiled), stock)


@pytest.mark.parametrize("settings", SETTINGS)
def test_compile_repeated_blocks(settings):
    """Each kind of block is a graph of its own: more of them than dynamo takes of one function by default."""
    unet, counter = make_unet(), CompileCounter()
    limit = torch._dynamo.config.recompile_limit
    apply_agentsd(unet, **settings)
    unet.compile_repeated_blocks(fullgraph=True, backend=counter)
    for out, reference in zip([call(unet, t) for t in STEPS], expected(**settings), strict=True):
        torch.testing.assert_close(out, reference, rtol=0, atol=1e-6)
    assert "late" not in settings or counter.frame_count > limit
    assert torch._dynamo.config.recompile_limit == limit


@pytest.mark.slow
def test_inductor_gives_the_same_picture():
    unet = make_unet()
    apply_agentsd(unet, cells="first")
    compiled = torch.compile(unet, fullgraph=True)
    for t in (999, 1):
        torch.testing.assert_close(call(compiled, t), call(unet, t), rtol=0, atol=1e-4)
