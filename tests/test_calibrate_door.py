"""What calibration refuses, and that the pipeline is left as it was."""

from __future__ import annotations

import copy

import accelerate
import pytest
import torch
from calibrating import SETTINGS, STEPS, run
from diffusers import (
    LCMScheduler,
    StableDiffusionImg2ImgPipeline,
)
from recipes import AGENTS_THEN_KEYS
from tiny import BETAS, make_unet, snapshot

from agentsd import Merge, apply_agentsd, calibrate
from agentsd.modules import FocusedLinear


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"speedup": None}, ValueError, "speedup=None, max_distance=None: give one goal"),
        ({"max_distance": 0.1}, ValueError, "speedup=1.5, max_distance=0.1: give one goal"),
        ({"speedup": 1.0}, ValueError, r"speedup=1\.0: pass more than 1"),
        ({"speedup": float("nan")}, ValueError, "speedup=nan: pass more than 1"),
        ({"speedup": None, "max_distance": -1}, ValueError, "max_distance=-1: pass more than 0"),
        ({"prompts": "a cat"}, ValueError, "prompts='a cat': pass a list"),
        ({"prompts": []}, ValueError, r"prompts=\[\]: pass a list"),
        ({"held_out": "a dog"}, ValueError, "held_out='a dog': pass a list"),
        ({"held_out": ["a cat"]}, ValueError, r"held_out=\['a cat'\]: they are among the prompts"),
        ({"cost": "flops"}, ValueError, "cost='flops': choose 'time' or 'macs'"),
        ({"operators": [FocusedLinear()]}, ValueError, r"FocusedLinear\(.*: it is to be trained"),
        ({"operators": [Merge]}, ValueError, "pass operators, as"),
        ({"reference_steps": 9}, ValueError, "reference_steps=9: pass more than num_inference_steps=25"),
        ({"early_frac": 2}, ValueError, "early_frac=2: pass a share"),
        ({"num_inference_steps": 5}, ValueError, "nothing can be left out .* a run of 5 steps has none"),
        ({"timesteps": [1, 2]}, ValueError, r"timesteps=\[1, 2\]: leave it out"),
        ({"output_type": "pil"}, ValueError, "output_type='pil': leave it out"),
    ],
)
def test_wrong_arguments_are_named_before_any_run(plain, monkeypatch, changes, error, message):
    monkeypatch.setattr(type(plain), "__call__", lambda *args, **kwargs: pytest.fail("it was run"))
    before = snapshot(plain.unet)
    with pytest.raises(error, match=message):
        calibrate(plain, **{"prompts": ["a cat"], "speedup": 1.5} | changes)
    assert snapshot(plain.unet) == before


def test_what_cannot_be_calibrated_is_refused_before_any_run(plain, make_plain, monkeypatch):
    monkeypatch.setattr(type(plain), "__call__", lambda *args, **kwargs: pytest.fail("it was run"))
    with pytest.raises(TypeError, match="is no pipeline with a `unet`"):
        calibrate(plain.unet, ["a cat"], speedup=1.5)
    with (
        apply_agentsd(plain, recipe=AGENTS_THEN_KEYS),
        pytest.raises(ValueError, match=r"call remove_agentsd\(pipe\) first"),
    ):
        calibrate(plain, ["a cat"], speedup=1.5)
    few = make_plain(scheduler=LCMScheduler(**BETAS, steps_offset=1))
    with pytest.raises(ValueError, match=r"nothing can be left out .* LCMScheduler is for few steps"):
        calibrate(few, ["a cat"], speedup=1.5)
    attn = plain.unet.down_blocks[0].attentions[0].transformer_blocks[0].attn1
    plain_processor = attn.processor
    attn.set_processor(type("Strange", (), {"__call__": lambda *args: None})())
    with pytest.raises(ValueError, match=r"down_blocks.* has a Strange"):
        calibrate(plain, ["a cat"], speedup=1.1)
    with pytest.raises(ValueError, match=r"down_blocks.* has a Strange, which may have to see each call"):
        calibrate(plain, ["a cat"], speedup=1.1, operators=())
    attn.set_processor(plain_processor)
    offloaded = make_plain()
    accelerate.cpu_offload(offloaded.unet)
    with pytest.raises(ValueError, match="kept elsewhere by sequential offloading: calibrate first"):
        calibrate(offloaded, ["a cat"], speedup=1.5)
    compiled = copy.copy(plain)
    compiled.unet = make_unet()
    compiled.unet.compile()
    with pytest.raises(ValueError, match="calibrate first, and compile it afterwards"):
        calibrate(compiled, ["a cat"], speedup=1.5)


def test_a_goal_out_of_reach_is_told_after_one_run(plain):
    before, runs = snapshot(plain.unet), []
    kind = type(plain).__call__

    class Counted(type(plain)):
        def __call__(self, *args, **kwargs):
            runs.append(1)
            return kind(self, *args, **kwargs)

    plain.__class__ = Counted
    with pytest.raises(ValueError, match=r"speedup=99 cannot be met .*: the greatest is about \d+\.\d\d"):
        calibrate(plain, ["a cat", "a dog"], speedup=99, **SETTINGS)
    assert len(runs) == 1
    assert snapshot(plain.unet) == before


def test_a_short_img2img_run_has_no_call_to_spare(plain):
    pipe = StableDiffusionImg2ImgPipeline(**plain.components, requires_safety_checker=False)
    before, image = snapshot(pipe.unet), {"image": torch.zeros(1, 3, 32, 32), "strength": 0.5}
    with pytest.raises(ValueError, match="a run of 4 steps has no call to spare: 8 or more are needed"):
        calibrate(pipe, ["a cat"], speedup=1.1, **SETTINGS, **image)
    assert snapshot(pipe.unet) == before


def test_a_model_that_fails_leaves_the_pipeline_as_it_was(plain):
    before, (baseline, _), calls = snapshot(plain.unet), run(plain), []

    def fail(*args):
        calls.append(1)
        if len(calls) == STEPS + 9:
            raise RuntimeError("out of memory")

    hook = plain.unet.conv_out.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        calibrate(plain, ["a cat"], speedup=1.5, **SETTINGS)
    hook.remove()
    assert snapshot(plain.unet) == before
    assert torch.equal(run(plain)[0], baseline)
