"""Features of the host that load, replace or rebuild processors around the patch, in any order."""

import pytest
import torch
from callers import draw
from pipelines import FEATURES, load_lora
from recipes import AGENTS_THEN_KEYS
from tiny import WIDTH, make_image_encoder, make_image_processor

from agentsd import apply_agentsd, remove_agentsd
from agentsd.attention.processor import AgentAttnProcessor

HALF = AGENTS_THEN_KEYS.with_settings(early_frac=0.5)


@pytest.fixture
def new_pipe(make_pipeline):
    """A pipeline that an IP-Adapter can be loaded into."""

    def build():
        parts = {"image_encoder": make_image_encoder(), "feature_extractor": make_image_processor()}
        return make_pipeline(**parts, safety_checker=None, requires_safety_checker=False)

    return build


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
def test_feature_and_patch_in_either_order(new_pipe, name):
    """The image does not depend on which came first, and each can be taken away first."""
    feature, pipe, twin = FEATURES[name], new_pipe(), new_pipe()
    plain = run(pipe)
    apply_agentsd(pipe, recipe=HALF)
    patched = run(pipe)
    remove_agentsd(pipe)

    feature.on(twin)
    featured = run(twin)
    apply_agentsd(twin, recipe=HALF)
    both = run(twin)
    assert not same(both, featured)  # the patch is at work under the feature

    apply_agentsd(pipe, recipe=HALF)
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


def test_lora_scaled_switched_and_fused_under_the_patch(new_pipe):
    pipe, twin = new_pipe(), new_pipe()
    apply_agentsd(pipe, recipe=AGENTS_THEN_KEYS)
    load_lora(pipe)
    load_lora(twin)
    for change in (
        lambda p: p.set_adapters(["style"], [0.5]),
        lambda p: p.fuse_lora(),
        lambda p: p.unfuse_lora(),
        lambda p: p.disable_lora(),
        lambda p: p.enable_lora(),
    ):
        change(pipe)
        change(twin)
        with apply_agentsd(twin, recipe=AGENTS_THEN_KEYS):
            assert same(run(pipe), run(twin))
