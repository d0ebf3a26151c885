"""Faults that were found and mended, each a test that the old code fails: copies of a patched U-Net."""

import copy
import io
import pickle

import pytest
import torch
from recipes import AGENTS_THEN_KEYS
from tiny import call, make_unet

from agentsd import ByDistance, Merge, PooledAgents, Recipe, apply_agentsd, remove_agentsd
from agentsd.modules import AgentModule

TRAINED = Recipe(AgentModule())


@pytest.mark.parametrize(
    ("recipe", "way"),
    [
        (AGENTS_THEN_KEYS, "deepcopy"),
        (AGENTS_THEN_KEYS, "pickle"),
        (AGENTS_THEN_KEYS, "torch.save"),
        (TRAINED, "torch.save"),
        (Recipe(Merge(ranking="layer"), levels=3), "pickle"),
        (Recipe(ByDistance((PooledAgents(4), PooledAgents(16)), (0.5,))), "pickle"),
    ],
)
def test_a_copy_of_a_patched_unet_has_a_patch_of_its_own(recipe, way):
    unet = make_unet()
    baseline = call(unet)
    apply_agentsd(unet, recipe=recipe)
    patched = call(unet)
    if way == "deepcopy":
        twin = copy.deepcopy(unet)
    elif way == "pickle":
        twin = pickle.loads(pickle.dumps(unet))
    else:
        torch.save(unet, file := io.BytesIO())
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    assert not torch.equal(patched, baseline)
    assert torch.equal(call(twin), patched)
    assert torch.equal(call(unet), patched)
    remove_agentsd(twin)
    assert torch.equal(call(twin), baseline)
    assert not any(m._forward_pre_hooks for m in twin.modules())
    assert torch.equal(call(unet), patched)


def test_a_handle_of_a_copy_undoes_the_copy():
    unet = make_unet()
    baseline = call(unet)
    apply_agentsd(unet, recipe=AGENTS_THEN_KEYS)
    patched = call(unet)
    twin = pickle.loads(pickle.dumps(unet))
    twin._agentsd.remove()
    assert torch.equal(call(twin), baseline)
    assert torch.equal(call(unet), patched)
