"""Cached steps compiled: no break, a graph a kind of call, none for a second run."""

import pytest
import torch
from callers import Guided
from recipes import STEP_CACHING
from tiny import make_small_unet
from torch._dynamo.testing import CompileCounter

from agentsd import Agents, Downsample, Phases, Recipe, StepCache, apply_agentsd

RECIPES = {
    "steps": (STEP_CACHING, 2),  # F and f
    "steps, order 0, two layers": (Recipe(steps=StepCache(3, extrapolation_order=0, layers=2)), 2),
    "steps and attention": (
        Recipe(Phases(Agents(), Downsample(), 0.4), steps=StepCache(2)),
        4,
    ),  # F, f; early, late
}


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def run(unet, caller):
    return [caller(unet, i) for i in range(len(caller.timesteps))]


@pytest.mark.parametrize(
    ("name", "order"),
    [*((name, "in place") for name in RECIPES), ("steps", "apply, compile"), ("steps", "compile, apply")],
)
def test_fullgraph_with_a_graph_for_each_kind_of_call(name, order):
    recipe, graphs = RECIPES[name]
    eager, unet, counter, caller = make_small_unet(), make_small_unet(), CompileCounter(), Guided()
    apply_agentsd(eager, recipe=recipe)
    expected = run(eager, caller)
    if order == "compile, apply":
        compiled = torch.compile(unet, fullgraph=True, backend=counter)
        apply_agentsd(compiled, recipe=recipe)
    elif order == "apply, compile":
        apply_agentsd(unet, recipe=recipe)
        compiled = torch.compile(unet, fullgraph=True, backend=counter)
    else:
        apply_agentsd(unet, recipe=recipe)
        unet.compile(fullgraph=True, backend=counter)
        compiled = unet
    for out, reference in zip(run(compiled, caller), expected, strict=True):
        torch.testing.assert_close(out, reference, rtol=0, atol=1e-6)
    assert counter.frame_count == graphs
    run(compiled, caller)
    assert counter.frame_count == graphs


def test_compile_repeated_blocks():
    """The blocks that are compiled lie inside those left out: only the last layer is theirs."""
    eager, unet, counter, caller = make_small_unet(), make_small_unet(), CompileCounter(), Guided()
    for model in (eager, unet):
        apply_agentsd(model, recipe=Recipe(steps=StepCache(2)))
    unet.compile_repeated_blocks(fullgraph=True, backend=counter)
    for out, reference in zip(run(unet, caller), run(eager, caller), strict=True):
        torch.testing.assert_close(out, reference, rtol=0, atol=1e-6)
    graphs = counter.frame_count
    assert graphs == 1
    run(unet, caller)
    assert counter.frame_count == graphs
