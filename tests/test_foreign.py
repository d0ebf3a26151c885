"""What others put on a U-Net's layers.

The rule: what agentsd can't prove to be unaffected by a skipped layer or a corrected call is not skipped or
corrected, and is named; attention goes on. The oracle is what the other saw and gave without agentsd.
"""

import functools

import diffusers
import pytest
import torch
from accelerate.hooks import ModelHook, SequentialHook, add_hook_to_module
from callers import Caller, Host, equal, letters, outputs
from diffusers.models.attention_processor import AttnProcessor2_0
from logs import logged, silent, warned
from recipes import EACH_KIND, STEP_CACHING
from tiny import make_unet, may_skip

from agentsd import Downsample, Recipe, apply_agentsd, remove_agentsd
from agentsd.recipe import AGENTSD

STEPS = 8


def run(unet, caller=None):
    return outputs(unet, caller or Caller(STEPS))


def count_forward(module, seen):
    forward = module.forward

    @functools.wraps(forward)
    def counted(*args, **kwargs):
        seen()
        return forward(*args, **kwargs)

    module.forward = counted
    return lambda: vars(module).pop("forward")


def change_class(method):
    def change(module, seen):
        before = type(module)

        def counted(self, *args, **kwargs):
            seen()
            return getattr(before, method)(self, *args, **kwargs)

        module.__class__ = type("Other", (before,), {method: counted})
        return lambda: setattr(module, "__class__", before)

    return change


def hook_all(module, seen):
    def look(one, args):
        if one is module:
            seen()

    return torch.nn.modules.module.register_module_forward_pre_hook(look).remove


WAYS = [  # how, where, and whether before the patch
    (lambda module, seen: module.register_forward_hook(seen).remove, "mid_block", True),
    (lambda module, seen: module.register_forward_pre_hook(seen).remove, "conv_in", False),
    (count_forward, "down_blocks.0", False),
    (change_class("forward"), "up_blocks.2", True),
    (change_class("forward"), "", False),  # the U-Net's own
    (change_class("__call__"), "up_blocks.2.resnets.0", False),
    (hook_all, "mid_block", True),
]


@pytest.mark.parametrize(("put", "place", "first"), WAYS)
def test_who_looks_at_a_layer_sees_each_call(put, place, first):
    """In whole; once it is gone, layers are skipped again."""
    seen, unet, expected = [], make_unet(), run(make_unet())
    handle = None if first else apply_agentsd(unet, recipe=STEP_CACHING)
    undo = put(unet.get_submodule(place), lambda *_: seen.append(1))
    handle = handle or apply_agentsd(unet, recipe=STEP_CACHING)
    try:
        with warned("may have to see each call; nothing is skipped"):
            assert equal(run(unet), expected)
    finally:
        undo()
    assert len(seen) == STEPS
    run(unet)
    assert "f" in handle.summary()


@pytest.mark.parametrize("may_miss", [False, True])
def test_who_counts_calls_of_the_unet_sees_no_corrections(may_miss):
    """Unless it says that it may see calls twice."""
    unet, seen, caller = make_unet(), [], Caller(STEPS)
    look = lambda *_: seen.append(1)  # noqa: E731
    handle = apply_agentsd(caller.pipe(unet), recipe=STEP_CACHING)
    unet.register_forward_pre_hook(may_skip(look) if may_miss else look)
    with silent() if may_miss else warned("has a hook .*cached steps are not corrected"):
        run(unet, caller)
    assert "f" in handle.summary()
    assert ("corrected" in handle.summary()) == may_miss == (len(seen) > STEPS)


class Chunks(torch.nn.Module):
    """Hands a layer its images one by one, as AnimateDiff's FreeNoise does its frames."""

    agentsd_may_skip = True

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x, encoder_hidden_states, **more):
        parts = zip(x.split(1), encoder_hidden_states.split(1), strict=True)
        return (torch.cat([self.inner(one, encoder_hidden_states=text, **more)[0] for one, text in parts]),)


def test_a_layer_that_gets_its_images_in_chunks_has_full_attention():
    made = []
    for chunked in (True, False):
        apply_agentsd(unet := make_unet(), recipe=Recipe(Downsample()))
        block = unet.down_blocks[0]
        if chunked:
            block.attentions[0] = Chunks(block.attentions[0])
        else:
            whole = type("Whole", (AttnProcessor2_0,), {"agentsd_may_skip": True})()
            block.attentions[0].transformer_blocks[0].attn1.set_processor(whole)
        with warned("it was left untouched" if chunked else "it is left untouched"):
            made.append(run(unet))
    torch.testing.assert_close(*made, rtol=0, atol=1e-5)


def test_a_trace_is_the_models_own():
    caller = Caller(STEPS)
    apply_agentsd(unet := make_unet().requires_grad_(False), recipe=AGENTSD)
    given = caller.latents[0], caller.timesteps[0], caller.text
    with warned("is being traced"), torch.no_grad():
        traced = torch.jit.trace(lambda *args: unet(*args, return_dict=False)[0], given, check_trace=False)
        torch.testing.assert_close(traced(*given), caller(make_unet(), 0), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "cast"),
    [("residuals", lambda i: i < 5), ("residuals", lambda i: i % 2 == 0), ("fast", lambda i: i == 7)],
)
def test_autocast_over_some_calls_alone(name, cast):
    """Nothing raises, and the first call under another dtype computes all layers."""
    handle, caller = apply_agentsd(unet := make_unet(), recipe=EACH_KIND[name]), Caller(12)
    stock = make_unet()
    for i in range(12):
        with torch.autocast("cpu", torch.bfloat16, enabled=cast(i)):
            made, expected = caller(unet, i), caller(stock, i)
        assert made.isfinite().all()
        assert made.dtype == expected.dtype
        assert cast(i) == cast(max(i - 1, 0)) or handle.summary()[i] == "F"


def scaling(base, name="Scales"):
    """A hook of another package that changes what a layer gives."""
    return type(name, (base,), {"post_forward": lambda self, module, output: 1.1 * output})()


def replaced_on_the_instance(module):
    hook = ModelHook()
    hook.post_forward = lambda module, output: 1.1 * output
    add_hook_to_module(module, hook)


def add_to_diffusers(module):
    registry = diffusers.hooks.HookRegistry.check_if_exists_or_initialize(module)
    registry.register_hook(
        scaling(diffusers.hooks.ModelHook, "OffloadAndScale"), "mine"
    )  # as diffusers' names


ADD = {
    "post_forward alone": lambda module: add_hook_to_module(module, scaling(ModelHook)),
    "in a sequence": lambda m: add_hook_to_module(m, SequentialHook(ModelHook(), scaling(ModelHook))),
    "on the instance": replaced_on_the_instance,
    "diffusers": add_to_diffusers,
}


@pytest.mark.parametrize("how", ADD)
def test_a_hook_of_the_hosts_that_another_package_made_sees_each_call(how):
    unet, baseline = make_unet(), make_unet()
    for one in (unet, baseline):
        ADD[how](one.mid_block.resnets[0])
    handle = apply_agentsd(unet, recipe=STEP_CACHING)
    with warned("nothing is skipped in this run"):
        assert equal(run(unet), run(baseline))
    assert letters(handle) == "F" * STEPS


def test_attention_that_is_masked_stays_full_and_says_so():
    """In a layer, and in its words, not T-GATE's."""

    def mask(module, args, kwargs):
        return args, kwargs | {"attention_mask": torch.zeros(2, 1, args[0].shape[1])}

    apply_agentsd(unet := make_unet(), recipe=Recipe(Downsample(), levels=1))
    layer = unet.up_blocks[2].attentions[0].transformer_blocks[0].attn1
    layer.register_forward_pre_hook(mask, with_kwargs=True)
    with logged() as messages:
        made = Caller(STEPS)(unet, 0)
    assert not torch.equal(made, Caller(STEPS)(make_unet(), 0))  # the other layers have fewer keys
    assert [text for text in messages if "attn1 is given an attention mask; it was left untouched" in text]
    assert "T-GATE" not in " ".join(messages)


def test_a_patch_is_removed_whatever_became_of_the_pipelines_unet():
    pipe = Host(unet := make_unet())
    for other in (lambda *args: unet(*args), None, object()):
        pipe.unet = unet
        apply_agentsd(pipe, recipe=AGENTSD)
        pipe.unet = other
        remove_agentsd(pipe)
        assert not hasattr(unet, "_agentsd")
    with pytest.raises(TypeError, match="has no U-Net"):
        remove_agentsd(object())
