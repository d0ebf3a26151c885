"""Faults that were found and mended, each a test that the old code fails.

Hosts that set or look up processors by their class.
"""

import pytest
import torch
from recipes import AGENTS_THEN_KEYS
from tiny import make_unet

from agentsd import apply_agentsd, remove_agentsd
from agentsd.attention.processor import AgentAttnProcessor


def test_the_default_processors_can_be_set_while_patched(pipe, sample):
    baseline = sample(pipe)
    apply_agentsd(pipe, recipe=AGENTS_THEN_KEYS)
    patched = sample(pipe)
    pipe.unet.set_default_attn_processor()
    torch.testing.assert_close(sample(pipe), patched, rtol=0, atol=1e-4)
    remove_agentsd(pipe)
    assert not any(isinstance(p, AgentAttnProcessor) for p in pipe.unet.attn_processors.values())
    torch.testing.assert_close(sample(pipe), baseline, rtol=0, atol=1e-4)


def test_hooks_find_a_patched_processor_by_its_class():
    hooks = pytest.importorskip("diffusers.hooks._helpers", reason="this diffusers has no such hooks")
    unet = make_unet()
    known = {
        name: hooks.AttentionProcessorRegistry.get(p.__class__) for name, p in unet.attn_processors.items()
    }
    apply_agentsd(unet, recipe=AGENTS_THEN_KEYS)
    for name, processor in unet.attn_processors.items():
        assert hooks.AttentionProcessorRegistry.get(processor.__class__) is known[name]
