"""Faults that were found and mended: what a caller changes within a run.

The rule: what agentsd can't prove to be unaffected by a skipped layer or a corrected call is not skipped or
corrected, and is named; attention goes on. The oracle is what the other saw and gave without agentsd.
"""

import peft
import pytest
import torch
from callers import Caller, Guided
from foreign import LORA, RECIPES, STEPS, run
from pipelines import ip_adapter_weights
from recipes import STEP_CACHING
from tiny import WIDTH, make_unet

from agentsd import Downsample, Recipe, ResidualSharing, StepCache, apply_agentsd


def add_lora(unet):
    torch.manual_seed(1)
    unet.add_adapter(peft.LoraConfig(**LORA), "one")
    unet.add_adapter(peft.LoraConfig(**LORA), "two")
    unet.set_adapters(["one"], weights=[1.0])


def load_image_prompt(unet):
    unet._load_ip_adapter_weights([ip_adapter_weights(unet)])


def scale_image_prompt(unet):
    for processor in unet.attn_processors.values():
        if hasattr(processor, "scale"):
            processor.scale = [0.1]


def write_weights(unet):
    with torch.no_grad():
        unet.mid_block.resnets[0].conv1.weight.mul_(1.5)


CHANGES = {
    "a LoRA's scale": (add_lora, lambda unet: unet.set_adapters(["one"], weights=[0.1])),
    "another LoRA": (add_lora, lambda unet: unet.set_adapters(["two"], weights=[1.0])),
    "no LoRA": (add_lora, lambda unet: unet.disable_adapters()),
    "a fused LoRA": (add_lora, lambda unet: unet.fuse_lora(lora_scale=0.5)),
    "a new LoRA": (lambda unet: None, add_lora),
    "an image prompt's scale": (load_image_prompt, scale_image_prompt),
    "FreeU": (lambda unet: None, lambda unet: unet.enable_freeu(0.9, 0.2, 1.2, 1.4)),
    "weights": (lambda unet: None, write_weights),
}


EACH_SECOND = {
    "step-caching": Recipe(steps=StepCache(2)),
    "residuals": Recipe(Downsample(), residual=ResidualSharing(), steps=StepCache(2)),
}


@pytest.mark.parametrize("name", EACH_SECOND)
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_in_a_run_is_noticed(change, name):
    """The call after it computes all layers, whatever was planned: as the model gives it without agentsd."""
    prepare, alter = CHANGES[change]
    prepare(baseline := make_unet())
    prepare(unet := make_unet())
    more = {"added_cond_kwargs": {"image_embeds": [torch.ones(2, 1, WIDTH)]}} if "image" in change else {}
    handle = apply_agentsd(unet, recipe=EACH_SECOND[name])
    made = run(unet, Guided(STEPS), lambda i: i == 6 and alter(unet), **more)
    expected = run(baseline, Guided(STEPS), lambda i: i == 6 and alter(baseline), **more)
    letters = handle.summary().split()[0]
    assert (letters[5], letters[7]) == ("f", "F")  # both are planned as cached
    torch.testing.assert_close(made[7], expected[7], rtol=0, atol=1e-5)
    run(unet, Guided(STEPS), **more)
    assert "f" in handle.summary().split()[0]


def test_a_lora_scale_that_a_call_passes_is_part_of_it():
    add_lora(unet := make_unet())
    handle, caller = apply_agentsd(unet, recipe=STEP_CACHING), Guided(STEPS)
    for i in range(STEPS):
        caller(unet, i, cross_attention_kwargs={"scale": 1.0 if i < 6 else 0.5})
    letters = handle.summary().split()[0]
    assert letters[3] == letters[5] == "f"
    assert letters[6] == "F"  # which is planned to be cached


@pytest.mark.parametrize("name", ["residuals", "fast", "agentsd"])
@pytest.mark.parametrize("cast", [lambda i: i < 5, lambda i: i >= 6, lambda i: i % 2 == 0, lambda i: i == 7])
def test_autocast_over_some_calls_alone(name, cast):
    """Nothing raises, and the first call under another dtype computes all layers."""
    handle, caller = apply_agentsd(unet := make_unet(), recipe=RECIPES[name]), Caller(STEPS)
    stock, before = make_unet(), None
    for i in range(STEPS):
        with torch.autocast("cpu", torch.bfloat16, enabled=cast(i)):
            made, expected = caller(unet, i), caller(stock, i)
        assert made.isfinite().all()
        assert made.dtype == expected.dtype
        if before is not None and cast(i) != before:
            assert handle.summary()[i] == "F"
        before = cast(i)
