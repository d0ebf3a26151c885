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
from agentsd.modules import AgentModule
from agentsd.recipe import AGENTSD

SHARED, CACHED = ResidualSharing(), StepCache(2, warmup_steps=4)
RECIPES = {
    "paper": (AGENTSD, 2),  # early, late
    "agents, then keys": (AGENTS_THEN_KEYS, 2),
    "agent module": (Recipe(Phases(AgentModule(), None)), 2),
    "steps": (STEP_CACHING, 2),  # F and f
    "steps and attention": (Recipe(Phases(Agents(), Downsample(), 0.4), steps=StepCache(2)), 4),
    "shared agents": (Recipe(Agents(), residual=SHARED), 4),  # full, kept, shared, and kept on a map there
    "shared phases, cached": (Recipe(Phases(Agents(), Downsample()), residual=SHARED, steps=CACHED), 9),
}
ORDERS = {"paper": "apply, compile", "steps": "compile, apply"}
"""Of what is tried each time."""


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def patched(unet, recipe, order, backend):
    """A U-Net that is compiled, patched before or after that."""
    if order == "compile, apply":
        compiled = torch.compile(unet, fullgraph=True, backend=backend)
        apply_agentsd(compiled, recipe=recipe)
        return compiled
    apply_agentsd(unet, recipe=recipe)
    if order == "apply, compile":
        return torch.compile(unet, fullgraph=True, backend=backend)
    unet.compile(fullgraph=True, backend=backend)
    return unet


def near(outs, others, atol=1e-6):
    for out, other in zip(outs, others, strict=True):
        torch.testing.assert_close(out, other, rtol=0, atol=atol)


@pytest.mark.parametrize(
    "name", [name if name in ORDERS else pytest.param(name, marks=pytest.mark.slow) for name in RECIPES]
)
def test_fullgraph_with_a_graph_for_each_kind_of_call(name):
    """It gives what it gives uncompiled."""
    recipe, graphs = RECIPES[name]
    eager, unet, counter, caller = make_small_unet(), make_small_unet(), CompileCounter(), Guided(14)
    apply_agentsd(eager, recipe=recipe)
    compiled = patched(unet, recipe, ORDERS.get(name, "in place"), counter)
    with torch._dynamo.config.patch(recompile_limit=16):
        near(outputs(compiled, caller), outputs(eager, caller), atol=1e-5)
        assert counter.frame_count == graphs
        outputs(compiled, caller)
    assert counter.frame_count == graphs


@pytest.mark.slow
def test_apply_and_remove_on_a_model_that_has_already_run_compiled():
    eager, unet = make_small_unet(), make_small_unet()
    apply_agentsd(eager, recipe=AGENTS_THEN_KEYS)
    baseline = call(unet)
    compiled = torch.compile(unet, fullgraph=True, backend="eager")
    assert torch.equal(call(compiled), baseline)
    apply_agentsd(compiled, recipe=AGENTS_THEN_KEYS)
    torch.testing.assert_close(call(compiled), call(eager), rtol=0, atol=1e-6)
    remove_agentsd(compiled)
    assert torch.equal(call(compiled), baseline)


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
    near(outputs(unet, caller), outputs(eager, caller))
    assert counter.frame_count == 1
    outputs(unet, caller)
    assert counter.frame_count == 1


SLOW_WAYS = [pytest.param(way, marks=pytest.mark.slow) for way in ("pipe.unet, then apply", "in place")]


@pytest.mark.parametrize("way", ["apply, then pipe.unet", "blocks", *SLOW_WAYS])
def test_a_compiled_unets_corrections_run_compiled(make_pipeline, sample, way):
    ran, eager = [], []

    def backend(graph, inputs):
        return lambda *args: (ran.append(1), graph(*args))[1]

    pipe = make_pipeline(unet=make_small_unet(), scheduler=ddim())
    unet, recipe = pipe.unet, Recipe(steps=StepCache(2))
    if way == "apply, then pipe.unet":
        handle = apply_agentsd(pipe, recipe=recipe)
    if "pipe.unet" in way:
        pipe.unet = torch.compile(unet, backend=backend, fullgraph=True)
    elif way == "in place":
        unet.compile(backend=backend, fullgraph=True)
    else:
        unet.compile_repeated_blocks(backend=backend, fullgraph=True)
    if way != "apply, then pipe.unet":
        handle = apply_agentsd(pipe, recipe=recipe)
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
        torch.testing.assert_close(call(compiled, t), call(unet, t), rtol=0, atol=1e-4)
