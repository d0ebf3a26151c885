"""Features of the host that load, replace or rebuild processors around the patch, in any order."""

import pytest
import torch
from callers import draw
from pipelines import FEATURES
from recipes import AGENTS_THEN_KEYS
from tiny import WIDTH, make_image_encoder, make_image_processor

from agentsd import apply_agentsd, remove_agentsd
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
