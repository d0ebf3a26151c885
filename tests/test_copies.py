"""Copies of a patched U-Net: each has a patch of its own."""

import copy
import io
import pickle

import pytest
import torch
from callers import Guided, ddim, equal, outputs, whole
from logs import silent
from recipes import AGENTS_THEN_KEYS, STEP_CACHING
from tiny import call, make_unet

from agentsd import ByDistance, PooledAgents, Recipe, StepCache, apply_agentsd, remove_agentsd
from agentsd.apply import handle_of
from agentsd.modules import AgentModule


def saved(unet):
    torch.save(unet, file := io.BytesIO())
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda unet: pickle.loads(pickle.dumps(unet)),
    "torch.save": saved,
}


@pytest.mark.parametrize(
    ("recipe", "way"),
    [
        (AGENTS_THEN_KEYS, "deepcopy"),
        (Recipe(AgentModule()), "torch.save"),
        (Recipe(ByDistance((PooledAgents(4), PooledAgents(16)), (0.5,))), "pickle"),
    ],
)
def test_a_copy_of_a_patched_unet_has_a_patch_of_its_own(recipe, way):
    unet = make_unet()
    baseline = call(unet)
    apply_agentsd(unet, recipe=recipe)
    patched, twins = call(unet), [WAYS[way](unet) for _ in range(2)]
    assert not torch.equal(patched, baseline)
    for twin, remove in zip(twins, (remove_agentsd, lambda one: handle_of(one).remove()), strict=True):
        assert torch.equal(call(twin), patched)
        remove(twin)
        assert torch.equal(call(twin), baseline)
        assert not any(m._forward_pre_hooks for m in twin.modules())
        assert torch.equal(call(unet), patched)


@pytest.mark.parametrize("way", WAYS)
def test_a_copy_in_the_middle_of_a_run_begins_one_of_its_own(way):
    recipe, caller = Recipe(steps=StepCache(2)), Guided()
    handle = apply_agentsd(unet := make_unet(), recipe=recipe)
    outputs(unet, caller, calls=range(3))
    twin = WAYS[way](unet)
    with torch.no_grad():
        for parameter in unet.parameters():
            parameter.zero_()
    apply_agentsd(expected := make_unet(), recipe=recipe)
    again = Guided()
    assert equal(outputs(twin, again), outputs(expected, again))
    assert handle_of(twin).summary() == handle_of(expected).summary()
    assert handle.summary().startswith("FfF")
    remove_agentsd(twin)
    assert whole(twin)
    assert not hasattr(twin, "_reset_stateful_cache")


def test_a_copied_pipelines_patch_knows_the_copy(make_pipeline):
    pipe = make_pipeline(scheduler=ddim(12))
    apply_agentsd(pipe, recipe=STEP_CACHING)
    other, caller = copy.deepcopy(pipe), Guided(12)
    caller.timesteps = [int(t) for t in caller.timesteps]  # on the list of the copy's scheduler
    with silent():
        outputs(other.unet, caller)
    assert "f" in handle_of(other).summary()
    assert handle_of(other).pipe is other
    assert handle_of(copy.deepcopy(pipe.unet)).pipe is None
