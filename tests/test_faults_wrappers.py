"""Faults that were found and mended: processors, wrappers, subclasses and copies.

The rule: what agentsd can't prove to be unaffected by a skipped layer or a corrected call is not skipped or
corrected, and is named; attention goes on. The oracle is what the other saw and gave without agentsd.
"""

import diffusers
import peft
import pytest
import torch
from callers import Caller
from diffusers.models.attention_processor import AttnProcessor2_0
from foreign import LORA, RECIPES, STEPS, equal, run
from logs import logged, warned
from recipes import STEP_CACHING
from tiny import BETAS, make_unet, snapshot

from agentsd import apply_agentsd, remove_agentsd
from agentsd.apply import handle_of
from agentsd.recipe import AGENTSD


class Plain(torch.nn.Module):
    """As IP-Adapter's own package has plain attention."""

    def forward(self, *args, **kwargs):
        return AttnProcessor2_0()(*args, **kwargs)


def plain_module(name):
    return type(name, (Plain,), {})()


@pytest.mark.parametrize("kind", ["AttnProcessor2_0", "AttnProcessor"])
@pytest.mark.parametrize("name", RECIPES)
def test_processors_that_are_modules(name, kind):
    unet, twin = make_unet(), make_unet()
    unet.set_attn_processor({place: plain_module(kind) for place in unet.attn_processors})
    before, modules = snapshot(unet), list(dict(unet.named_modules()))
    expected = run(unet)
    apply_agentsd(unet, recipe=RECIPES[name])
    unet.to(torch.float32)
    unet.state_dict()
    made = run(unet)
    if RECIPES[name].steps is None:
        apply_agentsd(twin, recipe=RECIPES[name])
        torch.testing.assert_close(made, run(twin), rtol=0, atol=1e-4)
    else:
        assert equal(made, expected)  # they may have to see each call
    remove_agentsd(unet)
    assert snapshot(unet) == before
    assert list(dict(unet.named_modules())) == modules
    assert equal(run(unet), expected)


def test_a_plain_processor_with_weights_is_not_plain():
    unet = make_unet()
    processor = plain_module("AttnProcessor2_0")
    processor.scale = torch.nn.Parameter(torch.ones(1))
    unet.down_blocks[0].attentions[0].transformer_blocks[0].attn1.set_processor(processor)
    with pytest.raises(ValueError, match="has a AttnProcessor2_0, which agent attention would replace"):
        apply_agentsd(unet, recipe=AGENTSD)


def in_peft(unet):
    torch.manual_seed(1)
    return peft.get_peft_model(unet, peft.LoraConfig(**LORA))


class Own(diffusers.UNet2DConditionModel):
    """A subclass with a method more."""

    def more(self):
        return 1


WRAPPERS = {
    "PEFT": in_peft,
    "DataParallel": torch.nn.DataParallel,
    "compiled": lambda unet: torch.compile(unet, backend="eager"),
    "PEFT, compiled": lambda unet: torch.compile(in_peft(unet), backend="eager"),
    "PEFT, DataParallel": lambda unet: torch.nn.DataParallel(in_peft(unet)),
}


@pytest.mark.parametrize("first", ["wrapped", "patched"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_wrappers(wrapper, first):
    """The same as the model inside, and the way back through the wrapper or without."""
    inner = make_unet() if not wrapper.startswith("PEFT") else in_peft(make_unet()).get_base_model()
    apply_agentsd(inner, recipe=STEP_CACHING)
    expected = run(inner)
    unet = make_unet()
    if first == "patched":
        handle = apply_agentsd(unet, recipe=STEP_CACHING)
    wrapped = WRAPPERS[wrapper](unet)
    before = snapshot(unet) if first == "wrapped" else None
    if first == "wrapped":
        handle = apply_agentsd(wrapped, recipe=STEP_CACHING)
    made = run(wrapped)
    torch.testing.assert_close(made, expected, rtol=0, atol=1e-5)
    assert "f" in handle.summary()
    assert handle_of(wrapped) is handle_of(unet) is handle
    remove_agentsd(wrapped)
    assert handle_of(wrapped) is None
    assert before is None or snapshot(unet) == before


def test_a_model_of_one_of_several_processes(tmp_path):
    """Of one process here: DistributedDataParallel forwards calls, and keeps its own hooks."""
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        wrapped = torch.nn.parallel.DistributedDataParallel(unet := make_unet())
        handle = apply_agentsd(wrapped, recipe=STEP_CACHING)
        apply_agentsd(twin := make_unet(), recipe=STEP_CACHING)
        assert equal(run(wrapped), run(twin))
        assert "f" in handle.summary().split()[0]
        remove_agentsd(wrapped)
        assert handle_of(unet) is None
    finally:
        torch.distributed.destroy_process_group()


def test_copies_side_by_side_are_refused(monkeypatch):
    wrapped = torch.nn.DataParallel(make_unet())
    wrapped.device_ids = [0, 1]
    with pytest.raises(TypeError, match=r"DataParallel on devices \[0, 1\].*DistributedDataParallel"):
        apply_agentsd(wrapped)


class Stars(diffusers.UNet2DConditionModel):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


class Renamed(diffusers.UNet2DConditionModel):
    def forward(self, x, t, text, **more):
        return super().forward(x, t, text, **more)


def of_class(kind):
    unet = make_unet()
    unet.__class__ = kind
    return unet


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("kind", [Own, Stars, Renamed])
def test_subclasses(kind, name):
    """What has its own forward may call layers in its own way, so none is skipped."""
    apply_agentsd(unet := of_class(kind), recipe=RECIPES[name])
    apply_agentsd(plain := make_unet(), recipe=RECIPES[name])
    own = kind is not Own and RECIPES[name].steps is not None
    expected = run(make_unet()) if own else run(plain)
    with logged() as messages:
        assert equal(run(unet), expected)
    assert any("nothing is skipped" in message for message in messages) == own


def test_a_call_by_names_of_its_own_is_left_alone():
    class Keyword(diffusers.UNet2DConditionModel):
        def forward(self, *, x, t, text):
            return super().forward(x, t, text)

    apply_agentsd(unet := of_class(Keyword), recipe=AGENTSD)
    caller, plain = Caller(STEPS), make_unet()
    with warned("has no argument"), torch.no_grad():
        for i in range(STEPS):
            made = unet(x=caller.latents[i], t=caller.timesteps[i], text=caller.text).sample
            assert torch.equal(made, caller(plain, i))


def test_video_latents_with_frames_first():
    """Stable Video Diffusion's are (B, F, C, H, W)."""
    from agentsd.hosts import frames_of

    class Config:
        num_frames = 14

    assert frames_of(Config(), torch.empty(2, 14, 8, 4, 4)) == 14
    assert frames_of(diffusers.DDIMScheduler(**BETAS).config, torch.empty(2, 4, 7, 4, 4)) == 7
    assert frames_of(None, torch.empty(2, 4, 4, 4)) == 1
