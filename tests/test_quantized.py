"""Quantised U-Nets: each mode beside one with the same weights in plain layers, and what is refused.

A stand-in runs by default. torchao and bitsandbytes, which both print when diffusers imports them, are in an
environment of their own: `.ci/run` has it.
"""

import diffusers
import pytest
import torch
from agentsd_eval.calibration.search import calibrate
from agentsd_eval.images.digest import weights_digest
from calibrating import distance
from callers import draw
from quantized import BLOCK, PACKAGES, STAND_IN, dequantized, wide_unet
from recipes import AGENTS_THEN_KEYS, STEP_CACHING
from tiny import call, snapshot

from agentsd import Recipe, StepCache, apply_agentsd, remove_agentsd
from agentsd.modules import AgentModule
from agentsd.recipe import AGENTSD

RECIPES = {
    "paper": AGENTSD,
    "step-caching": STEP_CACHING,
    "steps and attention": Recipe(AGENTS_THEN_KEYS.attention, steps=StepCache(2, extrapolation_order=0)),
}
FIRST = "down_blocks.0.attentions.0.transformer_blocks.0.attn1"
IN_PACKAGES = [pytest.param(name, marks=pytest.mark.quantized) for name in PACKAGES]


@pytest.fixture(params=[*STAND_IN, *IN_PACKAGES])
def quantize(request):
    return (STAND_IN | PACKAGES)[request.param]


@pytest.fixture
def host(quantize, make_pipeline):
    return make_pipeline(unet=quantize(wide_unet()))


def run(pipe):
    return draw(pipe, num_inference_steps=8)


def trained_folder(folder):
    """A folder of trained weights of a U-Net that is not quantised, and what they give."""
    unet = wide_unet()
    handle = apply_agentsd(unet, recipe=Recipe(AgentModule()))
    with torch.no_grad():
        for parameter in handle.parameters():
            parameter.mul_(1.5)
    handle.save(folder)
    return folder, call(unet)


def test_its_layers_are_quantised(quantize):
    """All of self-attention, and the weights are others than before."""
    unet = quantize(wide_unet())
    weight = unet.get_submodule(FIRST).to_q.weight
    assert type(weight) is not torch.nn.Parameter or weight.shape != (BLOCK, BLOCK)
    assert 1e-4 < distance(call(unet), call(wide_unet())) < 0.5
    assert distance(call(dequantized(unet)), call(unet)) < 0.01


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe(host, make_pipeline, name):
    """It gives what it gives on plain layers of the same weights, and is undone to the bit.

    As near as 8 times the baseline's distance to the baseline on those layers: some quantised ones round
    their input too.
    """
    baseline, before = run(host), snapshot(host.unet)
    handle = apply_agentsd(host, recipe=RECIPES[name])
    image = run(host)
    handle.remove()
    assert torch.equal(run(host), baseline)
    assert snapshot(host.unet) == before
    plain = make_pipeline(unet=dequantized(host.unet))
    rounding = distance(run(plain), baseline)
    apply_agentsd(plain, recipe=RECIPES[name])
    assert distance(image, baseline) > 1e-4
    assert distance(image, run(plain)) < 1e-4 + 8 * rounding


def test_quantised_after_the_patch(quantize):
    made = []
    for first in (True, False):
        unet = quantize(wide_unet()) if first else wide_unet()
        apply_agentsd(unet, recipe=AGENTS_THEN_KEYS)
        made.append(call(unet if first else quantize(unet)))
    assert torch.equal(*made)


def test_a_digest_tells_weights_apart(quantize):
    """Also where a quantised tensor can't be flattened."""
    other = wide_unet()
    with torch.no_grad():
        other.get_submodule(FIRST).to_v.weight.mul_(-1)
    digests = [weights_digest(quantize(unet)) for unet in (wide_unet(), wide_unet(), other)]
    assert digests[0] == digests[1] != digests[2]
    assert weights_digest(wide_unet()) != digests[0]


def test_macs_of_quantised_layers_are_not_counted(host):
    with pytest.raises(ValueError, match=r"cost='macs': the U-Net is quantised, .*: pass cost='seconds'"):
        calibrate(host, ["a cat"], speedup=1.4, num_inference_steps=8)


@pytest.mark.quantized
def test_a_model_that_diffusers_quantises_as_it_loads_it(tmp_path):
    from torchao.quantization import Int8WeightOnlyConfig

    wide_unet().save_pretrained(tmp_path)
    config = diffusers.TorchAoConfig(Int8WeightOnlyConfig())
    loaded = diffusers.UNet2DConditionModel.from_pretrained(
        tmp_path, quantization_config=config, torch_dtype=torch.float32
    )
    unet = PACKAGES["torchao, 8 bit weights"](wide_unet())
    baseline = call(unet)
    for model in (loaded, unet):
        apply_agentsd(model, recipe=AGENTS_THEN_KEYS)
    assert torch.equal(call(loaded), call(unet))
    remove_agentsd(loaded)
    assert torch.equal(call(loaded), baseline)


def test_training_is_refused(host, tmp_path):
    with apply_agentsd(host, recipe=AGENTS_THEN_KEYS) as handle:
        with pytest.raises(ValueError, match=rf"{FIRST}.to_q.weight is quantised \(\w+\): train the model"):
            handle.parameters()
        with pytest.raises(ValueError, match=r"handle.recipe.save\(folder\) writes the recipe without"):
            handle.save(tmp_path)
        handle.recipe.save(tmp_path)
    with apply_agentsd(host, recipe=tmp_path) as again:
        assert again.recipe == handle.recipe


def test_trained_weights_are_refused(host, tmp_path):
    """They would be cast to integers, or not be read at all; the patch that was there stays."""
    folder, _ = trained_folder(tmp_path)
    apply_agentsd(host, recipe=AGENTS_THEN_KEYS)
    image, before = run(host), snapshot(host.unet)
    with pytest.raises(ValueError, match=r"to_q.weight is quantised .*into the model unquantised"):
        apply_agentsd(host, recipe=folder)
    assert snapshot(host.unet) == before
    assert torch.equal(run(host), image)


def test_trained_weights_that_are_quantised_later(quantize, tmp_path):
    """They are served, and what they took the place of is gone: that is said, and nothing is changed."""
    unet = wide_unet()
    baseline = call(unet)
    folder, trained = trained_folder(tmp_path)
    handle = apply_agentsd(unet, recipe=folder)
    quantize(unet)
    served = call(unet)
    assert distance(served, trained) < 0.5 * distance(served, baseline)
    before = snapshot(unet)
    for undo in (handle.remove, lambda: apply_agentsd(unet, recipe=AGENTS_THEN_KEYS)):
        with pytest.raises(ValueError, match="and can't be taken out again: load the model anew"):
            undo()
        assert snapshot(unet) == before
        assert torch.equal(call(unet), served)
