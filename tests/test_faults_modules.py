"""Faults that were found and mended, each a test that the old code fails.

The size, the dtype and the place of a trained module.
"""

import accelerate
import pytest
import torch
from recipes import AGENTS_THEN_KEYS
from tiny import call, make_controlnet, make_unet, snapshot

from agentsd import Recipe, apply_agentsd
from agentsd.modules import AgentModule, FocusedLinear

TRAINED = Recipe(AgentModule())


@pytest.mark.parametrize("make", [make_controlnet, lambda: make_unet(sample_size=None)])
def test_a_trained_module_needs_the_models_size(make):
    model = make()
    before = snapshot(model)
    with pytest.raises(ValueError, match=r"sample_size=None: \w+ does not say its size.*register_to_config"):
        apply_agentsd(model, recipe=TRAINED)
    assert snapshot(model) == before
    assert len(apply_agentsd(model, recipe=AGENTS_THEN_KEYS).layer_names) >= 2
    with pytest.raises(ValueError, match="sample_size=None"):
        apply_agentsd(model, recipe=TRAINED)
    assert model._agentsd.recipe == AGENTS_THEN_KEYS  # the patch that was there
    model.register_to_config(sample_size=16)  # the way out
    assert len(apply_agentsd(model, recipe=TRAINED).parameters()) > 2


@pytest.mark.parametrize("storage", [torch.float8_e4m3fn, torch.bfloat16])
@pytest.mark.parametrize("recipe", [TRAINED, Recipe(FocusedLinear())])
def test_a_trained_module_has_the_dtype_of_computing_under_layerwise_casting(recipe, storage):
    unet = make_unet()
    unet.enable_layerwise_casting(storage_dtype=storage, compute_dtype=torch.float32)
    handle = apply_agentsd(unet, recipe=recipe)
    assert {p.dtype for module in handle._layers.modules for p in module.parameters()} == {torch.float32}
    assert call(unet).isfinite().all()


def test_a_trained_module_is_refused_where_weights_are_elsewhere():
    first, later = make_unet(), make_unet()
    apply_agentsd(first, recipe=TRAINED)
    expected = call(first)
    accelerate.cpu_offload(first, execution_device=torch.device("cpu"))  # the way out
    assert torch.equal(call(first), expected)

    accelerate.cpu_offload(later, execution_device=torch.device("cpu"))
    before = snapshot(later)
    with pytest.raises(ValueError, match=r"device 'meta'.*before pipe.enable_sequential_cpu_offload\(\)"):
        apply_agentsd(later, recipe=TRAINED)
    assert snapshot(later) == before
