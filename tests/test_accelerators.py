"""The patch beside other packages that make pipelines faster."""

import pytest
import torch
from callers import RUN, ddim, draw
from DeepCache import DeepCacheSDHelper
from diffusers.hooks import HookRegistry, PyramidAttentionBroadcastConfig, apply_pyramid_attention_broadcast
from logs import warned
from recipes import AGENTS_THEN_KEYS
from tgate import TgateSDLoader

from agentsd import Recipe, StepCache, apply_agentsd, remove_agentsd
from agentsd.recipe import AGENTSD

CACHES = Recipe(steps=StepCache(2))


def deepcache(pipe):
    helper = DeepCacheSDHelper(pipe=pipe)
    helper.set_params(cache_interval=3, cache_branch_id=0)
    helper.enable()
    return helper.disable


def pyramid(pipe):
    config = PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=2,
        spatial_attention_timestep_skip_range=(-1, 1001),
        spatial_attention_block_identifiers=("blocks",),
        current_timestep_callback=lambda: 500,
    )
    apply_pyramid_attention_broadcast(pipe.unet, config)
    registry = HookRegistry.check_if_exists_or_initialize(pipe.unet)
    return lambda: registry.remove_hook("pyramid_attention_broadcast", recurse=True)


@pytest.mark.parametrize(("patch_first", "recipe"), [(True, AGENTSD), (False, AGENTS_THEN_KEYS)])
def test_deepcache_in_either_order(pipe, sample, patch_first, recipe):
    pipe.scheduler = ddim()  # DeepCache looks timesteps up: they must not repeat
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


@pytest.mark.parametrize("first", ["agentsd", "the other"])
@pytest.mark.parametrize("other", [deepcache, pyramid])
def test_another_cache_keeps_the_run_whole(make_pipeline, sample, other, first):
    pipe, twin = make_pipeline(scheduler=ddim()), make_pipeline(scheduler=ddim())
    for host in (twin, pipe):
        if host is pipe and first == "agentsd":
            handle = apply_agentsd(pipe, recipe=CACHES)
        off = other(host)
        if host is pipe and first != "agentsd":
            handle = apply_agentsd(pipe, recipe=CACHES)
        if host is twin:
            expected = draw(host, **RUN)
    with warned("which may have to see each call; nothing is skipped"):
        made = draw(pipe, **RUN)
    assert torch.equal(made, expected)
    off()
    sample(pipe, **RUN)
    assert "f" in handle.summary()
