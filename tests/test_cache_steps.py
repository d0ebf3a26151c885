"""Cached steps between computed ones."""

from functools import partial

import pytest
from cache_twin import Twin
from callers import RUN, Caller, equal, letters, outputs
from sampling import SAMPLERS
from tiny import make_sdxl_unet, make_small_unet, make_unet

from agentsd import Recipe, StepCache, apply_agentsd
from agentsd.planning import unsupported_reason

deep_unet, deep_sdxl_unet = (partial(make, layers_per_block=2) for make in (make_unet, make_sdxl_unet))
"""Three layers in the last up block, as Stable Diffusion has; SDXL's have no attention there."""


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


@pytest.mark.parametrize(
    ("settings", "symbols"),
    [
        ({"interval": 1}, "FFFFF"),
        ({"warmup_steps": 3, "late_interval": 6}, "FFFfFfFfFffFfffFffFf"),
        ({"warmup_steps": 3, "late_interval": 6}, "FFFfFfFfFffFffFfffFffffFf"),
        ({"interval": 3, "warmup_steps": 3}, "FFFffFffFf"),
        ({"late_interval": 6}, "FfFfFffFff"),
        ({"late_interval": 3, "warmup_steps": 4}, "FFFFfFfFfF"),
    ],
)
def test_which_steps_are_computed(settings, symbols):
    """Written out by hand: after step i the next is max(interval, round(1 + (late - 1) i / count)) later."""
    assert "".join("fF"[one] for one in StepCache(**settings).full_steps(len(symbols))) == symbols


@pytest.mark.parametrize(
    ("name", "symbols"),
    [
        ("PLMS", "FfffFffFffF"),  # repeats its second timestep
        ("Heun", "FffffFFffffFFffffFF"),
    ],
)
def test_a_steps_calls_share_its_decision(make_pipeline, sample, name, symbols):
    pipe = make_pipeline(make_small_unet(), SAMPLERS[name].make())
    handle = apply_agentsd(pipe, recipe=Recipe(steps=StepCache(3)))
    sample(pipe, **RUN)
    assert letters(handle) == symbols
    assert f"{symbols.count('f')} cached" in handle.summary()


def test_runs_of_few_steps_have_none_to_spare():
    for count, reason in ((7, "a run of 7 steps has none to spare (fewer than 8)"), (8, "")):
        assert unsupported_reason(make_small_unet(), count, None) == reason
