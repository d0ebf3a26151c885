"""Caching in every kind of pipeline: each run is compared with a twin's that computes every call in whole.

The pipelines whose sampler is left at PLMS get DDIM, under which cached steps are corrected.
"""

import diffusers
import pytest
import torch
from cache_twin import Twin
from callers import Off, ddim, draw, letters
from logs import silent, warned
from pipelines import FEATURES, HOSTS, MORE, build_host, cases
from tiny import INPUT_IMAGE, WIDTH, kept, make_image_encoder, make_image_processor, make_unet, snapshot

from agentsd import Recipe, ResidualSharing, StepCache, apply_agentsd, remove_agentsd

STEPS = StepCache(2, extrapolation_order=0)
CACHED = Recipe(steps=STEPS)
SHARED = Recipe(Off(constant=0.3), residual=ResidualSharing(2, warmup_steps=2), steps=STEPS)
"""An operator whose error stays the same gives what cached steps alone give."""
WHOLE = {"LCM": "LCMScheduler is for few steps", "SD Turbo": "a run of 4 steps has none to spare"}


@pytest.fixture
def build(make_pipeline, tokenizer):
    """Build a host under whose sampler cached steps are corrected, and a function that runs it."""

    def make(name):
        pipe, run = build_host(make_pipeline, tokenizer, name, num_inference_steps=8)
        if name != "PLMS" and isinstance(pipe.scheduler, diffusers.PNDMScheduler):
            pipe.scheduler = ddim()
        return pipe, run

    return make


def check(pipe, run, *more, rounds=1):
    """Run with caching and as the twin does: the letters of the calls. No more is said than `more`.

    A pipeline may make several runs alike, `rounds`.
    """
    before = snapshot(pipe.unet)
    handle = apply_agentsd(pipe, recipe=CACHED)
    with silent(*more):
        image = run()
    symbols, summary = letters(handle), handle.summary()
    assert not kept(handle)
    remove_agentsd(pipe)
    assert snapshot(pipe.unet) == before
    twin = Twin(pipe.unet, rounds * symbols, scheduler=pipe.scheduler)
    expected = run()
    twin.remove()
    assert not twin.left
    assert f"{twin.corrected // rounds} corrected" in summary or not twin.corrected
    assert twin.corrected or "corrected" not in summary
    assert (image - expected).abs().max() < 1e-4 * max(1.0, expected.abs().max())
    return symbols


@pytest.mark.parametrize("name", cases([*(name for name in HOSTS if name not in WHOLE), *MORE]))
def test_host(build, name):
    assert set(check(*build(name))) == set("Ff")


@pytest.mark.parametrize("name", ["ControlNet", "AnimateDiff", "Heun"])
def test_residuals_are_shared_in_each_host(build, name):
    pipe, run = build(name)
    images = []
    for recipe in (CACHED, SHARED):
        with apply_agentsd(pipe, recipe=recipe) as handle:
            images.append(run())
    assert "attention" in handle.summary()
    assert (images[1] - images[0]).abs().max() < 1e-3 * max(1.0, images[0].abs().max())


@pytest.mark.parametrize("name", WHOLE)
def test_few_step_models_stay_whole_and_say_so(build, name):
    pipe, run = build(name)
    baseline = run()
    for recipe in (CACHED, SHARED):
        handle = apply_agentsd(pipe, recipe=recipe)
        with warned(WHOLE[name]):
            assert torch.equal(run(), baseline)
        assert set(letters(handle)) == {"F"}
        assert "attention" not in handle.summary()


@pytest.mark.parametrize("name", ["IP-Adapter", "LoRA", "FreeU", "fused QKV", "attention slicing"])
def test_feature(make_pipeline, name):
    parts = {"image_encoder": make_image_encoder(), "feature_extractor": make_image_processor()}
    pipe = make_pipeline(**parts, scheduler=ddim())
    FEATURES[name].on(pipe)
    more = {
        "IP-Adapter": {"ip_adapter_image_embeds": [torch.ones(2, 1, WIDTH)]},
        "LoRA": {"cross_attention_kwargs": {"scale": 0.5}},
    }.get(name, {})
    assert set(check(pipe, lambda: draw(pipe, num_inference_steps=8, **more))) == set("Ff")


@pytest.mark.slow
def test_freeinit(build):
    """Each of its rounds is a run of its own."""
    pipe, run = build("AnimateDiff")
    pipe.enable_free_init(num_iters=2, use_fast_sampling=False)
    assert check(pipe, run, rounds=2) == "FfFfFfFf"


@pytest.mark.slow
def test_marigold(make_pipeline):
    """A text without words and no guidance."""
    more = {"scale_invariant": True, "shift_invariant": True}
    more["scheduler"] = ddim(prediction_type="v_prediction")
    pipe = make_pipeline(unet=make_unet(in_channels=8), cls=diffusers.MarigoldDepthPipeline, **more)

    def run():
        rng = torch.Generator().manual_seed(0)
        sizes = {"processing_resolution": 0, "ensemble_size": 1, "output_latent": True}
        return pipe(INPUT_IMAGE, num_inference_steps=8, generator=rng, **sizes).latent

    assert check(pipe, run) == "FfFfFfFf"


def test_guidance_that_is_cut_off_in_the_middle(build):
    pipe, run = build("guidance_rescale")

    def cut_off(pipe, step, t, tensors):
        if step == 4:
            pipe._guidance_scale = 0.0
            tensors["prompt_embeds"] = tensors["prompt_embeds"].chunk(2)[-1]
        return tensors

    callback = {"callback_on_step_end": cut_off, "callback_on_step_end_tensor_inputs": ["prompt_embeds"]}
    said = "shape or dtype and encoder_hidden_states"
    symbols = check(pipe, lambda: run(guidance_rescale=0.0, **callback), said)
    assert symbols == "FfFfFFFf"  # a batch of its own has no states at first
