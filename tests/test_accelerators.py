"""The patch beside other packages that make pipelines faster."""

import diffusers
import pytest
import torch
from logs import warned
from recipes import AGENTS_THEN_KEYS
from tiny import BETAS

from agentsd import apply_agentsd, remove_agentsd
from agentsd.recipe import PAPER


def deepcache(pipe):
    from DeepCache import DeepCacheSDHelper

    helper = DeepCacheSDHelper(pipe=pipe)
    helper.set_params(cache_interval=3, cache_branch_id=0)
    helper.enable()
    return helper.disable


@pytest.mark.parametrize("recipe", [PAPER, AGENTS_THEN_KEYS])
@pytest.mark.parametrize("patch_first", [True, False])
def test_deepcache_in_either_order(pipe, sample, patch_first, recipe):
    pipe.scheduler = diffusers.DDIMScheduler(**BETAS)  # DeepCache looks timesteps up: they must not repeat
    baseline = sample(pipe)
    disable = deepcache(pipe)
    cached = sample(pipe)
    apply_agentsd(pipe, recipe=recipe)
    both = sample(pipe)
    assert not torch.equal(both, cached)
    disable()
    remove_agentsd(pipe)
    assert torch.equal(sample(pipe), baseline)

    steps = [lambda: apply_agentsd(pipe, recipe=recipe).remove, lambda: deepcache(pipe)]
    undo = [step() for step in (steps if patch_first else reversed(steps))]
    assert torch.equal(sample(pipe), both)
    for back in undo:
        back()
    assert torch.equal(sample(pipe), baseline)


def test_tgate_goes_round_processors_and_that_is_said(pipe):
    from tgate import TgateSDLoader

    pipe.scheduler = diffusers.DDIMScheduler(**BETAS)
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
