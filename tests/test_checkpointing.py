"""Gradient checkpointing computes the layers of a call again, as they were."""

import gc

import pytest
import torch
from callers import equal, inputs
from recipes import AGENTS_THEN_KEYS
from tiny import make_unet

from agentsd import Agents, Downsample, Phases, Recipe, apply_agentsd

RANDOM = Agents(at_most=None, agent_ratio=0.95, ranking="layer", destinations="random")


def training_unet(checkpointing, recipe=AGENTS_THEN_KEYS):
    unet = make_unet().train()
    apply_agentsd(unet, recipe=recipe)
    if checkpointing:
        unet.enable_gradient_checkpointing()
    return unet


def forward(unet, seed, t=999):
    latent, text = inputs(seed)
    return unet(latent, torch.tensor([t, t]), text).sample.square().mean()


def grads(unet):
    return [p.grad.clone() for p in unet.parameters() if p.grad is not None]


def test_a_second_forward_before_the_backward_is_refused_under_checkpointing():
    expected, unet = training_unet(True), training_unet(True)
    forward(expected, 0).backward()
    first = forward(unet, 0)
    with pytest.raises(RuntimeError, match=r"a second forward before the backward.*backward\(\) after each"):
        forward(unet, 1)
    first.backward()
    assert equal(grads(expected), grads(unet))
    dropped = forward(unet, 1)
    del dropped
    gc.collect()
    forward(unet, 1)  # nothing waits any more

    plain = training_unet(False)
    (forward(plain, 0) + forward(plain, 1)).backward()  # nothing is computed again


def test_forward_and_backward_by_turns():
    """The same gradients with checkpointing as without: the same cells are drawn again."""
    found = []
    for checkpointing in (False, True):
        unet = training_unet(checkpointing, Recipe(Phases(RANDOM, Downsample())))
        for seed, t in enumerate((999, 1, 500, 999)):
            forward(unet, seed, t).backward()
        found.append(grads(unet))
    assert found[0]
    torch.testing.assert_close(*found, rtol=0, atol=1e-6)
