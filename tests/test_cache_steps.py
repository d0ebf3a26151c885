"""Cached steps between computed ones."""

import functools

import diffusers
import pytest
import torch
from cache_twin import Twin
from callers import RUN, Caller, ddim, deep_unet, draw, equal, letters, outputs
from logs import warned
from recipes import AGENTS_THEN_KEYS, STEP_CACHING
from tiny import BETAS, kept, make_sdxl_unet, make_small_unet, make_unet, may_skip, snapshot
from tiny import training_sigma as sigma

from agentsd import Recipe, StepCache, apply_agentsd
from agentsd.memory import CachedFeatures

deep_sdxl_unet = functools.partial(make_sdxl_unet, layers_per_block=2)
"""No attention in the last up block."""


def two_levels():
    """FreeU works on the last up block of so shallow a U-Net, and writes into its hidden states."""
    unet = make_small_unet(layers_per_block=2, block_out_channels=(16, 32))
    unet.enable_freeu(s1=0.9, s2=0.2, b1=1.5, b2=1.6)
    return unet


@pytest.mark.parametrize("layers", [0, 1, 2, 3])
@pytest.mark.parametrize("make", [deep_unet, deep_sdxl_unet, two_levels])
def test_a_cached_step_is_a_computed_one_of_a_twin_whose_deep_blocks_return_the_kept_states(make, layers):
    caller, unet, twin = Caller(size=(9, 7)), make(), make()
    steps = StepCache(3, extrapolation_order=0, layers=layers, correct=False)
    handle = apply_agentsd(unet, recipe=Recipe(steps=steps))
    Twin(twin, "FffFffFffF", layers)
    assert equal(outputs(unet, caller), outputs(twin, caller))
    assert letters(handle) == "FffFffFffF"


def test_a_cached_step_computes_the_last_layers_alone():
    unet, caller = deep_unet(), Caller()
    apply_agentsd(unet, recipe=Recipe(steps=StepCache(2)))
    caller(unet, 0)
    ran = []
    for name, module in unet.named_modules():
        if isinstance(module, torch.nn.Conv2d):
            module.register_forward_pre_hook(may_skip(lambda m, args, name=name: ran.append(name)))
    caller(unet, 1)
    last = "up_blocks.2.resnets.2"
    convs = [f"{last}.conv1", f"{last}.conv2", f"{last}.conv_shortcut"]
    transformer = [f"up_blocks.2.attentions.2.{name}" for name in ("proj_in", "proj_out")]
    assert ran == ["conv_in", *convs, *transformer, "conv_out"]


def test_order_1_is_exact_on_states_linear_in_the_noise_level():
    states, slope, base = CachedFeatures(1), torch.randn(2, 3), torch.randn(2, 3)
    for timestep in (981.0, 901.0, 701.0):
        states.keep(sigma(timestep), [base + sigma(timestep) * slope])
        expected = base + sigma(661) * slope
        if timestep < 981.0:
            torch.testing.assert_close(states.extrapolate(sigma(661.0)), [expected], rtol=1e-4, atol=1e-4)
    states.keep(sigma(701.0), [base])  # a repeated timestep takes the place of the call before
    torch.testing.assert_close(states.extrapolate(sigma(701.0)), [base])
    torch.testing.assert_close(
        states.extrapolate(sigma(901.0)), [base + sigma(901) * slope], rtol=1e-4, atol=1e-4
    )


def test_states_between_three_are_on_the_parabola_through_them():
    """And each moves there from where it was extrapolated to by one difference, times a number of its own."""
    parts = torch.randn(3, 2, 3, dtype=torch.float64)

    def state(level):
        return [parts[0] + level * parts[1] + level**2 * parts[2]]

    states, between = CachedFeatures(1, interpolates=True), (5.0, 4.0, 3.5)
    for level in (9.0, 8.0, 6.0):
        states.keep(level, state(level))
    before = [states.extrapolate(level)[0] for level in between]
    torch.testing.assert_close(before[0], state(6.0)[0] + (state(8.0)[0] - state(6.0)[0]) * -0.5)
    states.keep(3.0, state(3.0))
    after = [states.interpolate(level)[0] for level in between]
    for found, level in zip(after, between, strict=True):
        torch.testing.assert_close(found, state(level)[0])
    pairs = zip(after, before, between, strict=True)
    moved = [(new - old) / states.newton_term(at) for new, old, at in pairs]
    torch.testing.assert_close(moved, [moved[0]] * 3)


@pytest.mark.parametrize(
    ("count", "symbols"),
    [
        (20, "FFFfFfFfFffFfffFffFf"),
        (25, "FFFfFfFfFffFffFfffFffffFf"),
        (34, "FFFfFfFfFfFfFffFffFfffFfffFffffFff"),
    ],
)
def test_later_intervals_are_longer_in_runs_of_any_length(count, symbols):
    """Written out by hand: after step i comes the next computed one max(2, round(1 + 5 i / count)) later."""
    computed = StepCache(2, warmup_steps=3, late_interval=6).full_steps(count)
    assert "".join("fF"[one] for one in computed) == symbols


def test_deepcache_gives_the_same_images(make_pipeline, sample):
    from DeepCache import DeepCacheSDHelper

    pipe = make_pipeline(unet=deep_unet(), scheduler=ddim())
    helper = DeepCacheSDHelper(pipe=pipe)
    helper.set_params(cache_interval=3, cache_branch_id=0)
    helper.enable()
    theirs = sample(pipe, **RUN)
    helper.disable()
    with apply_agentsd(pipe, recipe=Recipe(steps=StepCache(3, extrapolation_order=0, correct=False))):
        assert torch.equal(sample(pipe, **RUN), theirs)


def test_every_step_computed_is_bit_equal_to_baseline():
    unet, caller = make_unet(), Caller()
    before, baseline = snapshot(unet), outputs(unet, caller)
    with apply_agentsd(unet, recipe=Recipe(steps=StepCache(1))) as handle:
        assert equal(outputs(unet, caller), baseline)
        assert set(letters(handle)) == {"F"}
        assert not kept(handle)
    assert snapshot(unet) == before


@pytest.mark.parametrize(
    ("scheduler", "settings", "symbols"),
    [
        (diffusers.DDIMScheduler, {"interval": 2}, "FfFfFfFfFf"),
        (diffusers.DDIMScheduler, {"interval": 3, "warmup_steps": 3}, "FFFffFffFf"),
        (diffusers.DDIMScheduler, {"late_interval": 6}, "FfFfFffFff"),
        (diffusers.DDIMScheduler, {"interval": 2, "late_interval": 3, "warmup_steps": 4}, "FFFFfFfFfF"),
        (diffusers.PNDMScheduler, {"interval": 3}, "FfffFffFffF"),  # PLMS repeats its second timestep
        (diffusers.HeunDiscreteScheduler, {"interval": 3}, "FffffFFffffFFffffFF"),
    ],
)
def test_a_steps_calls_share_its_decision(make_pipeline, sample, scheduler, settings, symbols):
    more = {"skip_prk_steps": True} if scheduler is diffusers.PNDMScheduler else {}
    pipe = make_pipeline(make_small_unet(), scheduler(**BETAS, **more))
    handle = apply_agentsd(pipe, recipe=Recipe(steps=StepCache(**settings)))
    sample(pipe, **RUN)
    assert letters(handle) == symbols
    assert f"{symbols.count('f')} cached" in handle.summary()


def test_attention_runs_where_its_layer_does(make_pipeline, sample):
    """The layers that a cached step computes have theirs; those that it leaves out warn of nothing."""
    pipe = make_pipeline(unet=deep_unet())
    handle = apply_agentsd(pipe, recipe=Recipe(AGENTS_THEN_KEYS.attention, steps=StepCache(2)))
    image = sample(pipe, **RUN)  # a warning is an error in there
    assert handle.summary().startswith("FffFfFfFfFf ")
    apply_agentsd(pipe, recipe=Recipe(steps=StepCache(2)))
    assert not torch.equal(sample(pipe, **RUN), image)


def test_few_steps_stay_whole_and_say_so_once(make_pipeline, sample):
    pipe = make_pipeline()
    baseline = sample(pipe, num_inference_steps=7)
    handle = apply_agentsd(pipe, recipe=STEP_CACHING)
    with warned("a run of 7 steps has none to spare"):
        image = draw(pipe, num_inference_steps=7)
    assert torch.equal(image, baseline)
    assert handle.summary() == "FFFFFFFF  (8 calls: 8 full)"
    assert torch.equal(sample(pipe, num_inference_steps=7), baseline)  # not said again
    sample(pipe, **RUN)
    assert "f" in letters(handle)


@pytest.mark.parametrize(
    ("unet", "recipe", "message"),
    [
        ({}, Recipe(steps=StepCache(layers=3)), "layers=3: the last up block has 2"),
        (
            {"down_block_types": ("SimpleCrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D")},
            STEP_CACHING,
            "UNet2DConditionModel has a SimpleCrossAttnDownBlock2D, which no cached step knows",
        ),
    ],
)
def test_a_model_that_has_no_such_layers_is_refused(unet, recipe, message):
    unet = make_unet(**unet)
    before = snapshot(unet)
    with pytest.raises(ValueError, match=message):
        apply_agentsd(unet, recipe=recipe)
    assert snapshot(unet) == before
