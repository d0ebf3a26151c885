"""The patch beside other packages that make pipelines faster."""

import pytest
import torch
from callers import RUN, ddim, deepcache, draw
from logs import warned
from recipes import AGENTS_THEN_KEYS
from tgate import TgateSDLoader

from agentsd import Recipe, StepCache, apply_agentsd, remove_agentsd


def test_deepcache_in_either_order(pipe, sample):
    """Each is taken away in the order in which it came."""
    pipe.scheduler = ddim()  # DeepCache looks timesteps up: they must not repeat
    baseline, both = sample(pipe), []
    steps = [lambda: apply_agentsd(pipe, recipe=AGENTS_THEN_KEYS).remove, lambda: deepcache(pipe)]
    for order in (steps, steps[::-1]):
        undo = [step() for step in order]
        both.append(sample(pipe))
        for back in undo:
            back()
        assert torch.equal(sample(pipe), baseline)
    deepcache(pipe)
    assert torch.equal(*both)
    assert not torch.equal(sample(pipe), both[0])


def test_tgate_goes_round_processors_and_that_is_said(pipe):
    pipe.scheduler = ddim()
    gated = TgateSDLoader(pipe, gate_step=4, sp_interval=1, fi_interval=1, warm_up=2, num_inference_steps=6)

    def run():
        settings = {"gate_step": 4, "num_inference_steps": 6, "output_type": "latent"}
        return gated.tgate("a cat", generator=torch.Generator().manual_seed(0), **settings).images

    baseline = run()
    apply_agentsd(pipe, recipe=AGENTS_THEN_KEYS)
    with warned("without its attention processor"):
        assert torch.equal(run(), baseline)
    remove_agentsd(pipe)
    assert torch.equal(run(), baseline)


@pytest.mark.parametrize("patch_first", [True, False])
def test_another_cache_keeps_the_run_whole(make_pipeline, sample, patch_first):
    pipe, twin = make_pipeline(scheduler=ddim()), make_pipeline(scheduler=ddim())
    deepcache(twin)
    steps = [lambda: deepcache(pipe), lambda: apply_agentsd(pipe, recipe=Recipe(steps=StepCache(2)))]
    first, second = (step() for step in (reversed(steps) if patch_first else steps))
    handle, off = (first, second) if patch_first else (second, first)
    with warned("which may have to see each call; nothing is skipped"):
        assert torch.equal(draw(pipe, **RUN), draw(twin, **RUN))
    off()
    sample(pipe, **RUN)
    assert "f" in handle.summary()
