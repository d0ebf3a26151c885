"""The patch beside other packages that make pipelines faster."""

from functools import partial

import torch
from callers import RUN, ddim, deepcache, draw
from logs import silent, warned
from recipes import AGENTS_THEN_KEYS
from tgate import TgateSDLoader

from agentsd import Recipe, StepCache, apply_agentsd, remove_agentsd


def test_deepcache_in_either_order(pipe, sample):
    """No step is skipped beside it. Each is taken away in the order in which it came."""
    pipe.scheduler = ddim()  # DeepCache looks timesteps up: they must not repeat
    baseline, both = sample(pipe, **RUN), []
    for recipe in (AGENTS_THEN_KEYS, Recipe(AGENTS_THEN_KEYS.attention, steps=StepCache(2))):
        steps = [partial(deepcache, pipe), lambda recipe=recipe: apply_agentsd(pipe, recipe=recipe).remove]
        for order in (steps, steps[::-1]):
            undo = [step() for step in order]
            with warned("see each call; nothing is skipped") if recipe.steps else silent():
                both.append(draw(pipe, **RUN))
            for back in undo:
                back()
            assert torch.equal(sample(pipe, **RUN), baseline)
    deepcache(pipe)
    assert all(torch.equal(image, both[0]) for image in both)
    assert not torch.equal(sample(pipe, **RUN), both[0])


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
