"""Processors of others, and wrappers of a U-Net.

The rule is that of `test_foreign.py`; the oracle is the model inside.
"""

from itertools import cycle

import peft
import pytest
import torch
from callers import Caller, equal, letters, outputs
from diffusers.models.attention_processor import AttnProcessor2_0
from pipelines import LORA
from recipes import EACH_KIND, STEP_CACHING
from tiny import make_small_unet, make_unet, snapshot

from agentsd import apply_agentsd, remove_agentsd
from agentsd.apply import handle_of


def run(unet):
    return outputs(unet, Caller(12))


def plain_module(name):
    """As IP-Adapter's own package has plain attention."""

    def forward(self, *args, **kwargs):
        return AttnProcessor2_0()(*args, **kwargs)

    return type(name, (torch.nn.Module,), {"forward": forward})()


@pytest.mark.parametrize("name", ["residuals", "agents"])
def test_processors_that_are_modules(name):
    unet, twin = make_unet(), make_unet()
    unet.set_attn_processor({place: plain_module("AttnProcessor2_0") for place in unet.attn_processors})
    before, modules = snapshot(unet), list(dict(unet.named_modules()))
    expected = run(unet)
    apply_agentsd(unet, recipe=EACH_KIND[name])
    unet.to(torch.float32)
    unet.state_dict()
    made = run(unet)
    if EACH_KIND[name].steps is None:
        apply_agentsd(twin, recipe=EACH_KIND[name])
        torch.testing.assert_close(made, run(twin), rtol=0, atol=1e-4)
    else:
        assert equal(made, expected)  # they may have to see each call
    remove_agentsd(unet)
    assert snapshot(unet) == before
    assert list(dict(unet.named_modules())) == modules


def in_peft(unet):
    torch.manual_seed(1)
    return peft.get_peft_model(unet, peft.LoraConfig(**LORA))


WRAPPERS = {
    "PEFT": in_peft,
    "DataParallel": torch.nn.DataParallel,
    "PEFT, DataParallel": lambda unet: torch.nn.DataParallel(in_peft(unet)),
    "DistributedDataParallel": torch.nn.parallel.DistributedDataParallel,  # it keeps its own hooks
}


@pytest.fixture
def one_process(tmp_path):
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize(("wrapper", "first"), [*zip(WRAPPERS, cycle(["wrapped", "patched"]))])
def test_wrappers(wrapper, first):
    """The same as the model inside, and the way back through the wrapper or without."""
    inner, unet, before = make_small_unet(), make_small_unet(), None
    if wrapper.startswith("PEFT"):
        inner = in_peft(inner).get_base_model()
    apply_agentsd(inner, recipe=STEP_CACHING)
    expected = run(inner)
    if first == "patched":
        handle = apply_agentsd(unet, recipe=STEP_CACHING)
    wrapped = WRAPPERS[wrapper](unet)
    if first == "wrapped":
        before, handle = snapshot(unet), apply_agentsd(wrapped, recipe=STEP_CACHING)
    torch.testing.assert_close(run(wrapped), expected, rtol=0, atol=1e-5)
    assert "f" in letters(handle)
    assert handle_of(wrapped) is handle_of(unet) is handle
    remove_agentsd(wrapped)
    assert handle_of(wrapped) is None
    assert before is None or snapshot(unet) == before
