"""torch.compile without a graph break. The graph-counting backend runs the traced graph as it is."""

import pytest
import torch
from recipes import AGENTS_THEN_KEYS
from tiny import call, make_small_unet, make_unet
from torch._dynamo.testing import CompileCounter

from agentsd import (
    Agents,
    ByDistance,
    Downsample,
    Merge,
    Phases,
    PooledAgents,
    Recipe,
    apply_agentsd,
    remove_agentsd,
)
from agentsd.modules import AgentModule
from agentsd.recipe import AGENTSD

STEPS = (999, 800, 700, 400, 100, 1)
RECIPES = {
    "paper": AGENTSD,
    "agents, then keys": AGENTS_THEN_KEYS,
    "merge later": Recipe(Phases(Agents(), Merge())),
}
OTHERS = {
    "pooled agents of merged tokens": Recipe(Phases(PooledAgents(12, ratio=0.4), None)),
    "agent module": Recipe(Phases(AgentModule(), None)),
    # a latent that does not move is in the first stage twice, then in the last
    "pooled agents by distance": Recipe(
        ByDistance([PooledAgents(count, at_most=None) for count in (16, 4)], (0.5,))
    ),
}
BLOCK_GRAPHS = {
    "agents, then keys": (5, 7),
    "merge later": (5, 9),
}
"""Of all blocks in the early steps, and in the whole run."""


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def expected(make, recipe):
    unet = make()
    apply_agentsd(unet, recipe=recipe)
    return [call(unet, t) for t in STEPS]


@pytest.mark.parametrize(
    ("order", "name"),
    [
        ("apply, compile", "paper"),
        *((order, "agents, then keys") for order in ("compile, apply", "apply, compile", "in place")),
        *(("apply, compile", name) for name in OTHERS),
    ],
)
def test_fullgraph_with_two_graphs_in_a_run(order, name):
    """It gives what it gives uncompiled; no break, one graph a phase, and none for a second run."""
    make = make_unet if order == "in place" else make_small_unet  # tokens of one level, and of two
    unet, counter, recipe = make(), CompileCounter(), (RECIPES | OTHERS)[name]
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
    for out, reference in zip([call(compiled, t) for t in STEPS], expected(make, recipe), strict=True):
        torch.testing.assert_close(out, reference, rtol=0, atol=1e-6)
    assert counter.frame_count == 2
    for t in STEPS:
        call(compiled, t)
    assert counter.frame_count == 2


def test_apply_and_remove_on_a_model_that_has_already_run_compiled():
    unet, counter = make_small_unet(), CompileCounter()
    baseline = call(unet)
    compiled = torch.compile(unet, fullgraph=True, backend=counter)
    assert torch.equal(call(compiled), baseline)
    apply_agentsd(compiled, recipe=AGENTS_THEN_KEYS)
    torch.testing.assert_close(
        call(compiled), expected(make_small_unet, AGENTS_THEN_KEYS)[0], rtol=0, atol=1e-6
    )
    remove_agentsd(compiled)
    assert torch.equal(call(compiled), baseline)


@pytest.mark.parametrize("name", BLOCK_GRAPHS)
def test_compile_repeated_blocks(name):
    """Each kind of block is a graph of its own: more of them than dynamo takes of one function by default."""
    unet, counter, recipe = make_unet(), CompileCounter(), RECIPES[name]
    limit = torch._dynamo.config.recompile_limit
    apply_agentsd(unet, recipe=recipe)
    unet.compile_repeated_blocks(fullgraph=True, backend=counter)
    graphs = []
    for t, reference in zip(STEPS, expected(make_unet, recipe), strict=True):
        torch.testing.assert_close(call(unet, t), reference, rtol=0, atol=1e-6)
        graphs.append(counter.frame_count)
    early, all_steps = BLOCK_GRAPHS[name]
    assert graphs == [early] * 3 + [all_steps] * 3
    for t in STEPS:
        call(unet, t)
    assert counter.frame_count == all_steps
    assert all_steps > limit or name != "merge later"
    assert torch._dynamo.config.recompile_limit == limit


@pytest.mark.slow
def test_inductor_gives_the_same_image():
    unet = make_unet()
    apply_agentsd(unet, recipe=Recipe(Phases(Agents(destinations="first"), Downsample())))
    compiled = torch.compile(unet, fullgraph=True)
    for t in (999, 1):
        torch.testing.assert_close(call(compiled, t), call(unet, t), rtol=0, atol=1e-4)
