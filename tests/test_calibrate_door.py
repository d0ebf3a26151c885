"""What calibration refuses, and that the pipeline is left as it was."""

from __future__ import annotations

import copy

import accelerate
import pytest
import torch
from agentsd_eval.calibration.runs import Runs
from agentsd_eval.calibration.search import calibrate
from calibrating import SETTINGS, STEPS, run
from diffusers import (
    LCMScheduler,
)
from recipes import AGENTS_THEN_KEYS
from tiny import BETAS, make_unet, may_skip, snapshot

from agentsd import Merge, Recipe, StepCache, apply_agentsd
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
        ({"cost": "flops"}, ValueError, "cost='flops': choose 'macs' or 'seconds'"),
        ({"candidates": [Recipe(FocusedLinear())]}, ValueError, r"FocusedLinear\(.*: it is to be trained"),
        ({"candidates": [Merge()]}, TypeError, r"Merge\(.* is a Merge: pass recipes"),
        ({"reference_steps": 9}, ValueError, "reference_steps=9: pass more than num_inference_steps=25"),
        ({"num_inference_steps": 5}, ValueError, "nothing can be cached .* a run of 5 steps has none"),
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
    with pytest.raises(ValueError, match=r"nothing can be cached .* LCMScheduler is for few steps"):
        calibrate(few, ["a cat"], speedup=1.5)
    attn = plain.unet.down_blocks[0].attentions[0].transformer_blocks[0].attn1
    plain_processor = attn.processor
    attn.set_processor(type("Strange", (), {"__call__": lambda *args: None})())
    with pytest.raises(ValueError, match=r"down_blocks.* has a Strange, which may have to see each call"):
        calibrate(plain, ["a cat"], speedup=1.1)
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


def test_a_goal_far_out_of_reach_is_told_after_the_boldest_candidate(plain, monkeypatch):
    seen = []
    compare = Runs.compare
    monkeypatch.setattr(
        Runs, "compare", lambda self, recipe, *args: seen.append(recipe) or compare(self, recipe, *args)
    )
    bold, careful = Recipe(steps=StepCache(4)), Recipe(steps=StepCache(2, warmup_steps=4))
    before = snapshot(plain.unet)
    with pytest.raises(ValueError, match=r"speedup=99 cannot be met .*: the greatest seen is \d\.\d\d"):
        calibrate(plain, ["a cat", "a dog"], speedup=99, candidates=[careful, bold], **SETTINGS)
    assert seen == [bold]
    assert snapshot(plain.unet) == before


def test_a_model_that_fails_leaves_the_pipeline_as_it_was(plain):
    before, baseline, calls = snapshot(plain.unet), run(plain), []

    def fail(*args):
        calls.append(1)
        if len(calls) == STEPS + 9:
            raise RuntimeError("out of memory")

    hook = plain.unet.conv_out.register_forward_hook(may_skip(fail))
    with pytest.raises(RuntimeError, match="out of memory"):
        calibrate(plain, ["a cat"], speedup=1.5, **SETTINGS)
    hook.remove()
    assert snapshot(plain.unet) == before
    assert torch.equal(run(plain), baseline)
