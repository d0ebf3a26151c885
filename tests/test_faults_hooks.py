"""Faults that were found and mended: what others put on a U-Net's layers.

The rule: what agentsd can't prove to be unaffected by a skipped layer or a corrected call is not skipped or
corrected, and is named; attention goes on. The oracle is what the other saw and gave without agentsd.
"""

import functools

import pytest
import torch
from callers import Caller
from diffusers.models.attention_processor import AttnProcessor2_0
from foreign import RECIPES, STEPS, equal, run
from logs import silent, warned
from recipes import STEP_CACHING
from tiny import make_unet, may_skip
from torch.utils._pytree import tree_leaves

from agentsd import Agents, Downsample, Recipe, ResidualSharing, apply_agentsd, remove_agentsd
from agentsd.recipe import AGENTSD


class Seen:
    """A function that counts its calls and notes shapes."""

    def __init__(self):
        self.shapes = []

    def __call__(self, *args):
        self.shapes.append([tuple(x.shape) for x in tree_leaves(args[-1]) if isinstance(x, torch.Tensor)])


def count_forward(module, seen):
    forward = module.forward

    @functools.wraps(forward)
    def counted(*args, **kwargs):
        seen(args)
        return forward(*args, **kwargs)

    module.forward = counted
    return lambda: vars(module).pop("forward")


def change_class(module, seen):
    before = type(module)

    class Other(before):
        def forward(self, *args, **kwargs):
            seen(args)
            return super().forward(*args, **kwargs)

    module.__class__ = Other
    return lambda: setattr(module, "__class__", before)


def change_call(module, seen):
    before = type(module)

    class Other(before):
        def __call__(self, *args, **kwargs):
            seen(args)
            return super().__call__(*args, **kwargs)

    module.__class__ = Other
    return lambda: setattr(module, "__class__", before)


def hook_all(module, seen):
    kind = type(module)

    def look(one, args):
        if type(one) is kind and one is module:
            seen(args)

    return torch.nn.modules.module.register_module_forward_pre_hook(look).remove


WAYS = {
    "forward hook": lambda module, seen: module.register_forward_hook(lambda *args: seen(*args)).remove,
    "pre-hook": lambda module, seen: module.register_forward_pre_hook(lambda *args: seen(*args)).remove,
    "pre-hook with names": lambda module, seen: (
        module.register_forward_pre_hook(
            lambda module, args, kwargs: seen(args or tuple(kwargs.values())), with_kwargs=True
        ).remove
    ),
    "partial": lambda module, seen: (
        module.register_forward_pre_hook(functools.partial(lambda seen, *args: seen(*args), seen)).remove
    ),
    "forward": count_forward,
    "class": change_class,
    "call of a class": change_call,
    "hook of all modules": hook_all,
}
PLACES = [
    ("mid_block", True),
    ("down_blocks.0", False),
    ("up_blocks.2", True),
    ("up_blocks.2.resnets.0", False),
]
PLACES += [("conv_in", False), ("conv_out", True)]
"""And whether the hook is there before the patch."""


@pytest.mark.parametrize(("place", "first"), PLACES)
@pytest.mark.parametrize("way", WAYS)
def test_who_looks_at_a_layer_sees_each_call(way, place, first):
    """In whole, whether put there before or after the patch; once it is gone, layers are skipped again."""
    seen, of_baseline, baseline, unet = Seen(), Seen(), make_unet(), make_unet()
    undo = WAYS[way](baseline.get_submodule(place), of_baseline)
    expected = run(baseline)
    undo()
    handle = None if first else apply_agentsd(unet, recipe=STEP_CACHING)
    undo = WAYS[way](unet.get_submodule(place), seen)
    handle = handle or apply_agentsd(unet, recipe=STEP_CACHING)
    try:
        with warned("may have to see each call; nothing is skipped"):
            made = run(unet)
    finally:
        undo()
    assert seen.shapes == of_baseline.shapes
    assert equal(made, expected)
    run(unet)
    assert "f" in handle.summary()


def test_attention_goes_on_where_layers_are_looked_at():
    unet, other, seen = make_unet(), make_unet(), Seen()
    apply_agentsd(other, recipe=AGENTSD)
    unet.mid_block.register_forward_hook(lambda *args: seen(*args))
    handle = apply_agentsd(unet, recipe=AGENTSD)
    with silent():
        assert equal(run(unet), run(other))
    assert {kind.attention for kind in handle.last_run} == {"operator"}
    assert len(seen.shapes) == STEPS


@pytest.mark.parametrize("name", ["fast", "residuals"])
def test_a_hook_that_edits_states_keeps_its_effect(name):
    """The state before the last up block, which a cached step would not have."""

    def edit(module, args, kwargs):
        return args, kwargs | {"hidden_states": kwargs["hidden_states"] * 1.01}

    expected = make_unet()
    expected.up_blocks[-1].register_forward_pre_hook(edit, with_kwargs=True)
    apply_agentsd(unet := make_unet(), recipe=RECIPES[name])
    unet.up_blocks[-1].register_forward_pre_hook(edit, with_kwargs=True)
    assert equal(run(unet), run(expected))


@pytest.mark.parametrize("way", ["forward hook", "pre-hook", "partial"])
def test_who_counts_calls_of_the_unet_sees_no_corrections(way):
    unet, seen, caller = make_unet(), Seen(), Caller(STEPS)
    handle = apply_agentsd(caller.pipe(unet), recipe=STEP_CACHING)
    WAYS[way](unet, seen)
    with warned("has a hook .*cached steps are not corrected"):
        run(unet, caller)
    assert len(seen.shapes) == STEPS
    assert "f" in handle.summary()
    assert "corrected" not in handle.summary()


def test_a_hook_may_say_that_it_can_miss_calls():
    unet, seen, caller = make_unet(), Seen(), Caller(STEPS)
    handle = apply_agentsd(caller.pipe(unet), recipe=STEP_CACHING)
    unet.conv_in.register_forward_hook(may_skip(lambda *args: seen(*args)))
    unet.register_forward_hook(may_skip(lambda *args: None))
    with silent():
        run(unet, caller)
    assert "corrected" in handle.summary()
    assert len(seen.shapes) > STEPS


def test_images_in_chunks_have_no_residual_of_one_another():
    """AnimateDiff's FreeNoise hands a layer its frames in parts."""

    class Chunks(torch.nn.Module):
        agentsd_may_skip = True

        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x, encoder_hidden_states, **more):
            parts = zip(x.split(1), encoder_hidden_states.split(1), strict=True)
            made = [self.inner(one, encoder_hidden_states=text, **more)[0] for one, text in parts]
            return (torch.cat(made),)

    def split(unet):
        for block in (unet.down_blocks[0], unet.up_blocks[-1]):
            block.attentions[0] = Chunks(block.attentions[0])

    shared = ResidualSharing(2, warmup_steps=2)
    recipes = [Recipe(operator, levels=1, residual=shared) for operator in (Agents(), Downsample())]
    for recipe in (AGENTSD, *recipes):
        apply_agentsd(unet := make_unet(), recipe=recipe)
        split(unet)
        with warned("tokens of 1 images where the latent's size gives 256 of 2; it was left untouched"):
            made = run(unet)
        # the layer in parts computes full attention, as it would without a patch
        expected = apply_agentsd(twin := make_unet(), recipe=recipe)
        for state, layer in zip(expected._layers.processors, expected._layers.attention_layers, strict=True):
            if state.name.startswith(("down_blocks.0.attentions.0", "up_blocks.2.attentions.0")):
                layer.attn.set_processor(type("Whole", (AttnProcessor2_0,), {"agentsd_may_skip": True})())
        torch.testing.assert_close(made, run(twin), rtol=0, atol=1e-5)


def test_a_trace_is_the_models_own():
    apply_agentsd(unet := make_unet(), recipe=AGENTSD)
    caller = Caller(STEPS)

    class Call(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.unet = unet

        def forward(self, x, t, text):
            return self.unet(x, t, text, return_dict=False)[0]

    given = caller.latents[0], caller.timesteps[0], caller.text
    with warned("is being traced"), torch.no_grad():
        traced = torch.jit.trace(Call(), given, check_trace=False)
    remove_agentsd(unet)
    with torch.no_grad():
        torch.testing.assert_close(traced(*given), caller(unet, 0), rtol=0, atol=1e-5)
