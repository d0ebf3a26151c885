"""torch.compile without a graph break: a graph a kind of call, and none for a second run.

The graph-counting backend runs the traced graph as it is.
"""

import pytest
import torch
from callers import RUN, Guided, ddim, letters, outputs
from recipes import AGENTS_THEN_KEYS, STEP_CACHING
from tiny import call, make_small_unet, make_unet, may_skip
from torch._dynamo.testing import CompileCounter

from agentsd import Phases, Recipe, ResidualSharing, StepCache, apply_agentsd, remove_agentsd
from agentsd.attention import Agents, Downsample, Merge
from agentsd.modules import AgentModule, AttnZero, FocusedLinear
from agentsd.recipe import AGENTSD

SHARED, CACHED = ResidualSharing(), StepCache(2, warmup_steps=4)
RECIPES = {
    "paper": (AGENTSD, 2),  # early, late
    "agents, then keys": (AGENTS_THEN_KEYS, 2),
    "agent module": (Recipe(Phases(AgentModule(), None)), 2),
    "focused": (Recipe(Phases(FocusedLinear(), None)), 2),
    "attnzero": (Recipe(Phases(AttnZero(), None)), 2),
    "steps": (STEP_CACHING, 2),  # F and f
    "steps and attention": (Recipe(Phases(Agents(), Downsample(), 0.4), steps=StepCache(2)), 4),
    "shared agents": (Recipe(Agents(), residual=SHARED), 4),  # full, kept, shared, and kept on a map there
    "shared phases, cached": (Recipe(Phases(Agents(), Downsample()), residual=SHARED, steps=CACHED), 9),
}
ORDERS = {"paper": "apply, compile", "steps": "compile, apply"}
"""Of what is tried each time."""


def slow_but(usual, names):
    """Parameters, of which some run each time."""
    return [name if name in usual else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def near(outs, others, atol=1e-6):
    torch.testing.assert_close(outs, others, rtol=0, atol=atol)


@pytest.mark.parametrize("name", slow_but(ORDERS, RECIPES))
def test_fullgraph_with_a_graph_for_each_kind_of_call(name):
    """It gives what it gives uncompiled, patched before or after that."""
    (recipe, graphs), order = RECIPES[name], ORDERS.get(name)
    eager, unet, counter, caller = make_small_unet(), make_small_unet(), CompileCounter(), Guided(14)
    apply_agentsd(eager, recipe=recipe)
    if order != "compile, apply":
        apply_agentsd(unet, recipe=recipe)
    compiled = torch.compile(unet, fullgraph=True, backend=counter) if order else unet
    if order == "compile, apply":
        apply_agentsd(compiled, recipe=recipe)
    elif order is None:
        unet.compile(fullgraph=True, backend=counter)
    with torch._dynamo.config.patch(recompile_limit=16):
        near(outputs(compiled, caller), outputs(eager, caller), atol=1e-5)
        assert counter.frame_count == graphs
        outputs(compiled, caller)
        assert counter.frame_count == graphs
        remove_agentsd(compiled)
        assert torch.equal(call(compiled), call(make_small_unet()))


@pytest.mark.slow
def test_each_kind_of_block_is_a_graph():
    """On two levels: more of them than dynamo takes of one function by default."""
    eager, unet, counter, caller = make_unet(), make_unet(), CompileCounter(), Guided()
    limit = torch._dynamo.config.recompile_limit
    for model in (eager, unet):
        apply_agentsd(model, recipe=Recipe(Phases(Agents(), Merge())))
    unet.compile_repeated_blocks(fullgraph=True, backend=counter)
    graphs = []
    near(outputs(unet, caller, lambda i: graphs.append(counter.frame_count)), outputs(eager, caller))
    assert graphs == [5] * 4 + [9] * 6
    outputs(unet, caller)
    assert counter.frame_count == 9 > limit
    assert torch._dynamo.config.recompile_limit == limit


def test_compile_repeated_blocks():
    """Those that are compiled lie inside of what cached steps leave out: only the last layer is theirs."""
    eager, unet, counter, caller = make_small_unet(), make_small_unet(), CompileCounter(), Guided()
    for model in (eager, unet):
        apply_agentsd(model, recipe=Recipe(steps=StepCache(2)))
    unet.compile_repeated_blocks(fullgraph=True, backend=counter)
    for _ in range(2):
        near(outputs(unet, caller), outputs(eager, caller))
        assert counter.frame_count == 1


WAYS = ("apply, then pipe.unet", "blocks", "pipe.unet, then apply", "in place")


@pytest.mark.parametrize("way", slow_but(WAYS[:2], WAYS))
def test_a_compiled_unets_corrections_run_compiled(make_pipeline, sample, way):
    ran, eager = [], []
    pipe = make_pipeline(unet=make_small_unet(), scheduler=ddim())
    unet, recipe = pipe.unet, Recipe(steps=StepCache(2))
    handle = apply_agentsd(pipe, recipe=recipe) if way == "apply, then pipe.unet" else None
    backend = {
        "backend": lambda graph, inputs: lambda *args: (ran.append(1), graph(*args))[1],
        "fullgraph": True,
    }
    if "pipe.unet" in way:
        pipe.unet = torch.compile(unet, **backend)
    else:
        (unet.compile if way == "in place" else unet.compile_repeated_blocks)(**backend)
    handle = handle or apply_agentsd(pipe, recipe=recipe)
    if way == "blocks":  # which lie inside of what cached steps leave out
        unet.conv_in.register_forward_hook(may_skip(lambda *_: eager.append(1)))
    sample(pipe, **RUN)
    assert set(letters(handle)) == set("Ff")
    assert "4 corrected" in handle.summary()
    assert len(eager if way == "blocks" else ran) == 14  # ten calls, and four once more


@pytest.mark.slow
def test_inductor_gives_the_same_image():
    unet = make_small_unet()
    apply_agentsd(unet, recipe=Recipe(Phases(Agents(destinations="first"), Downsample())))
    compiled = torch.compile(unet, fullgraph=True)
    for t in (999, 1):
        near(call(compiled, t), call(unet, t), atol=1e-4)
