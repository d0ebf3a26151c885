"""Calibration of other samplers and pipelines."""

from __future__ import annotations

from statistics import geometric_mean

import pytest
from calibrating import MERGE, SETTINGS, distance, run
from diffusers import (
    StableDiffusionControlNetPipeline,
    StableDiffusionXLPipeline,
)
from tiny import PICTURE, make_controlnet, sdxl_parts, sdxl_unet

from agentsd import apply_agentsd, calibrate
from agentsd.calibration import search


def test_steps_of_two_calls_and_no_guidance(make_plain, pipe, monkeypatch):
    """The default scheduler makes its second step twice, and both calls are what the step is."""
    monkeypatch.setattr(search, "FRONTIER", 4)
    plms = make_plain(scheduler=pipe.scheduler)
    settings = SETTINGS | {"operators": (), "guidance_scale": 1.0, "cost": "time"}
    prompts = ["a cat", "a dog", "a car"]
    found = calibrate(plms, prompts, max_distance=10.0, **settings)

    def three():
        return [run(plms, prompt, seed, guidance_scale=1.0)[0] for seed, prompt in enumerate(prompts)]

    with apply_agentsd(plms, recipe=found) as handle:
        patched = three()
        calls = handle.summary().split()[0]
    plan = found.measured["plan"]
    assert calls == plan[:2] + plan[1:]
    assert (found.guidance, found.layers) == (None, None)
    assert set(plan) == {"F", "f"}
    promised = found.measured["promises"]
    each = [distance(*pair) for pair in zip(patched, three(), strict=True)]
    assert promised["distance"] == pytest.approx(geometric_mean(each), rel=1e-3)
    assert (promised["prompts"], promised["held_out"]) == (3, False)


@pytest.mark.parametrize("host", ["SDXL", "ControlNet"])
def test_conditions_beside_the_prompt_are_recorded(make_pipeline, tokenizer, monkeypatch, host):
    monkeypatch.setattr(search, "FRONTIER", 2)
    if host == "SDXL":
        pipe = make_pipeline(sdxl_unet(), cls=StableDiffusionXLPipeline, **sdxl_parts(tokenizer))
        inputs = {}
    else:
        parts = {"cls": StableDiffusionControlNetPipeline, "controlnet": make_controlnet()}
        pipe, inputs = make_pipeline(**parts), {"image": PICTURE}
    settings = {"operators": (MERGE,), "cost": "time", **SETTINGS}
    found = calibrate(pipe, ["a cat"], max_distance=10.0, **settings, **inputs)
    assert 0 < found.measured["found"]["distance"] < 10
    with apply_agentsd(pipe, recipe=found) as handle:
        assert set(handle.layer_names) == set(found.layers or {})
