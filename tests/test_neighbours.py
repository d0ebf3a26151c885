"""Features of the host, and other packages, around the patch in any order."""

from functools import partial

import pytest
import torch
from callers import RUN, ddim, deepcache, draw
from logs import silent, warned
from pipelines import FEATURES
from recipes import AGENTS_THEN_KEYS
from tgate import TgateSDLoader
from tiny import WIDTH, make_image_encoder, make_image_processor

from agentsd import Recipe, StepCache, apply_agentsd, remove_agentsd
from agentsd.attention.processor import AgentAttnProcessor

HALF = AGENTS_THEN_KEYS.with_settings(early_frac=0.5)


@pytest.fixture
def pipes(make_pipeline):
    """Two pipelines that an IP-Adapter can be loaded into."""
    parts = {"image_encoder": make_image_encoder(), "feature_extractor": make_image_processor()}
    return [make_pipeline(**parts) for _ in range(2)]


def run(pipe):
    """Latents after two steps, one of them early."""
    inputs = {}
    if any("IPAdapter" in type(p).__name__ for p in pipe.unet.attn_processors.values()):
        inputs["ip_adapter_image_embeds"] = [torch.ones(2, 1, WIDTH)]
    return draw(pipe, num_inference_steps=2, **inputs)


def same(a, b):
    """Equal up to the rounding that fused projections bring."""
    return torch.allclose(a, b, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", FEATURES)
def test_feature_and_patch_in_either_order(pipes, name):
    """The image does not depend on which came first, and each can be taken away first."""
    feature, (pipe, twin) = FEATURES[name], pipes
    plain = run(pipe)
    apply_agentsd(pipe, recipe=HALF)
    patched = run(pipe)

    feature.on(twin)
    featured = run(twin)
    apply_agentsd(twin, recipe=HALF)
    both = run(twin)
    assert not same(both, featured)  # the patch is at work under the feature

    feature.on(pipe)
    assert same(run(pipe), both)
    feature.off(pipe)
    assert same(run(pipe), patched)
    feature.on(pipe)
    remove_agentsd(pipe)
    assert torch.equal(run(pipe), featured)

    feature.off(twin)
    assert same(run(twin), patched)
    remove_agentsd(twin)
    assert torch.equal(run(twin), plain)
    for module in twin.unet.modules():
        assert not any("agentsd" in key for key in vars(module))
    kept = getattr(twin.unet, "original_attn_processors", None) or {}
    assert not any(isinstance(p, AgentAttnProcessor) for p in kept.values())


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
