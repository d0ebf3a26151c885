"""What calls keep outlives CUDA graphs (`mode="reduce-overhead"`), whose outputs the next call overwrites."""

import pytest
import torch
from callers import Guided
from recipes import STEP_CACHING
from tiny import make_small_unet
from torch._inductor.cudagraph_trees import CUDAGraphTreeManager, MarkStepBox

from agentsd import Agents, Downsample, Merge, Phases, Recipe, ResidualSharing, StepCache
from agentsd import apply_agentsd as patch

SHARED = ResidualSharing(2, warmup_steps=1)
RECIPES = {
    "steps": STEP_CACHING,
    "sharing": Recipe(Merge(0.5), residual=SHARED, steps=StepCache(2)),
    "order 0": Recipe(steps=StepCache(2, extrapolation_order=0)),
    "paper": Recipe(Phases(Agents(ranking="layer"), Merge(ranking="layer"))),
    "default": Recipe(Phases(Agents(), Downsample(4, at_most=None)), residual=SHARED, steps=StepCache(2)),
}


class OverwrittenOutputs:
    """Runs graphs as they are, and overwrites what they gave when torch's own count begins a new generation.

    As under `mode="reduce-overhead"`: each call of a compiled function begins one, or, once it is in use,
    each `torch.compiler.cudagraph_mark_step_begin()`. Numbers become NaN, indices one that no tensor has.
    """

    def __init__(self):
        self.overwritten = self._generation = 0
        self._given = []

    def __call__(self, graph, inputs):
        def run(*args):
            self._begin()
            outputs = [out.clone() if isinstance(out, torch.Tensor) else out for out in graph(*args)]
            self._given += [out for out in outputs if isinstance(out, torch.Tensor)]
            return outputs

        return run

    def _begin(self):
        generation = CUDAGraphTreeManager.get_curr_generation()
        if generation == self._generation:
            return
        self._generation = generation
        for out in self._given:
            out.fill_(torch.nan if out.is_floating_point() else torch.iinfo(out.dtype).max)
        self.overwritten += len(self._given)
        self._given.clear()


@pytest.fixture(autouse=True)
def fresh_dynamo():
    before = MarkStepBox.mark_step_counter
    MarkStepBox.mark_step_counter = 0  # torch counts calls, whichever steps were marked before
    yield
    torch.compiler.reset()
    MarkStepBox.mark_step_counter = before


def run(unet, caller):
    return [caller(unet, i).clone() for i in range(10)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", RECIPES)
def test_real_graphs_give_what_eager_calls_give(name, monkeypatch):
    """A warm-up, a recording and two replays."""
    from torch._inductor.cudagraph_trees import get_container

    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    caller = Guided(10)
    caller.latents, caller.text = caller.latents.cuda(), caller.text.cuda()
    caller.scheduler.set_timesteps(10, device="cuda")
    caller.timesteps = caller.scheduler.timesteps
    eager, unet = make_small_unet().cuda(), make_small_unet().cuda()
    for model in (eager, unet):
        patch(model, recipe=RECIPES[name])
    compiled = torch.compile(unet, fullgraph=True, mode="reduce-overhead")
    expected = run(eager, caller)
    for _ in range(4):
        torch.testing.assert_close(run(compiled, caller), expected, rtol=0, atol=1e-3)
    assert get_container(0).tree_manager is not None  # something was recorded


SLOW = [(name, blocks) for name in ("sharing", "paper", "default") for blocks in (False, True)]


@pytest.mark.parametrize(
    ("name", "blocks"), [("order 0", False), *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_compiled_as_a_whole_or_its_blocks(name, blocks):
    """Blocks of one call are one generation: layers of a level share the map that one of them made."""
    eager, unet, caller, backend = make_small_unet(), make_small_unet(), Guided(10), OverwrittenOutputs()
    for model in (eager, unet):
        patch(model, recipe=RECIPES[name])
    expected = run(eager, caller)
    (unet.compile_repeated_blocks if blocks else unet.compile)(fullgraph=True, backend=backend)
    for _ in range(2):  # the second run compiles nothing
        torch.testing.assert_close(run(unet, caller), expected, rtol=0, atol=1e-6)
    assert backend.overwritten > 10
