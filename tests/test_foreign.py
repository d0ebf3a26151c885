"""What others put on a U-Net's layers, or change in the middle of a run.

The rule: what agentsd can't prove to be unaffected by a skipped layer or a corrected call is not skipped or
corrected, and is named; attention goes on. The oracle is what the other saw and gave without agentsd.
"""

import functools

import diffusers
import peft
import pytest
import torch
from accelerate.hooks import ModelHook, SequentialHook, add_hook_to_module
from callers import Caller, Guided, equal, letters, outputs
from diffusers.models.attention_processor import AttnProcessor2_0
from logs import logged, silent, warned
from pipelines import LORA, ip_adapter_weights
from recipes import EACH_KIND, STEP_CACHING
from tiny import WIDTH, make_unet, may_skip
from torch.utils._pytree import tree_leaves

from agentsd import Downsample, Recipe, apply_agentsd, remove_agentsd
from agentsd.recipe import AGENTSD

STEPS = 12


class Seen:
    """A function that counts its calls and notes shapes."""

    def __init__(self):
        self.shapes = []

    def __call__(self, *args):
        self.shapes.append([tuple(x.shape) for x in tree_leaves(args[-1]) if isinstance(x, torch.Tensor)])


def run(unet, caller=None, **more):
    return outputs(unet, caller or Caller(STEPS), **more)


def count_forward(module, seen):
    forward = module.forward

    @functools.wraps(forward)
    def counted(*args, **kwargs):
        seen(args)
        return forward(*args, **kwargs)

    module.forward = counted
    return lambda: vars(module).pop("forward")


def change_class(method):
    def change(module, seen):
        before = type(module)

        def counted(self, *args, **kwargs):
            seen(args)
            return getattr(before, method)(self, *args, **kwargs)

        module.__class__ = type("Other", (before,), {method: counted})
        return lambda: setattr(module, "__class__", before)

    return change


def hook_with_names(module, seen):
    def look(module, args, kwargs):
        seen(args or tuple(kwargs.values()))

    return module.register_forward_pre_hook(look, with_kwargs=True).remove


def hook_all(module, seen):
    def look(one, args):
        if one is module:
            seen(args)

    return torch.nn.modules.module.register_module_forward_pre_hook(look).remove


WAYS = {
    "forward hook": lambda module, seen: module.register_forward_hook(lambda *args: seen(*args)).remove,
    "pre-hook": lambda module, seen: module.register_forward_pre_hook(lambda *args: seen(*args)).remove,
    "pre-hook with names": hook_with_names,
    "forward": count_forward,
    "class": change_class("forward"),
    "call of a class": change_class("__call__"),
    "hook of all modules": hook_all,
}
FIRST = ["mid_block", "up_blocks.2", "conv_out"]
"""Places where something is put before the patch."""
LATER = ["down_blocks.0", "up_blocks.2.resnets.0", "conv_in"]
EACH_WAY = [(way, (LATER if i % 2 else FIRST)[i % 3], i % 2 == 0) for i, way in enumerate(WAYS)]


@pytest.mark.parametrize(("way", "place", "first"), EACH_WAY)
def test_who_looks_at_a_layer_sees_each_call(way, place, first):
    """In whole, whether put there before or after the patch; once it is gone, layers are skipped again."""
    seen, of_baseline, baseline, unet = Seen(), Seen(), make_unet(), make_unet()
    undo = WAYS[way](baseline.get_submodule(place), of_baseline)
    expected = run(baseline, Caller(8))
    undo()
    handle = None if first else apply_agentsd(unet, recipe=STEP_CACHING)
    undo = WAYS[way](unet.get_submodule(place), seen)
    handle = handle or apply_agentsd(unet, recipe=STEP_CACHING)
    try:
        with warned("may have to see each call; nothing is skipped"):
            made = run(unet, Caller(8))
    finally:
        undo()
    assert seen.shapes == of_baseline.shapes
    assert equal(made, expected)
    run(unet, Caller(8))
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


def test_who_counts_calls_of_the_unet_sees_no_corrections():
    unet, seen, caller = make_unet(), Seen(), Caller(STEPS)
    handle = apply_agentsd(caller.pipe(unet), recipe=STEP_CACHING)
    WAYS["pre-hook"](unet, seen)
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


def add_lora(unet):
    torch.manual_seed(1)
    unet.add_adapter(peft.LoraConfig(**LORA), "one")
    unet.add_adapter(peft.LoraConfig(**LORA), "two")
    unet.set_adapters(["one"], weights=[1.0])


def load_image_prompt(unet):
    unet._load_ip_adapter_weights([ip_adapter_weights(unet)])


def scale_image_prompt(unet):
    for processor in unet.attn_processors.values():
        if hasattr(processor, "scale"):
            processor.scale = [0.1]


def write_weights(unet):
    with torch.no_grad():
        unet.mid_block.resnets[0].conv1.weight.mul_(1.5)


CHANGES = {
    "a LoRA's scale": (add_lora, lambda unet: unet.set_adapters(["one"], weights=[0.1])),
    "no LoRA": (add_lora, lambda unet: unet.disable_adapters()),
    "a fused LoRA": (add_lora, lambda unet: unet.fuse_lora(lora_scale=0.5)),
    "a new LoRA": (lambda unet: None, add_lora),
    "an image prompt's scale": (load_image_prompt, scale_image_prompt),
    "FreeU": (lambda unet: None, lambda unet: unet.enable_freeu(0.9, 0.2, 1.2, 1.4)),
    "weights": (lambda unet: None, write_weights),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_in_a_run_is_noticed(change):
    """The call after it computes all layers, whatever was planned: as the model gives it without agentsd."""
    prepare, alter = CHANGES[change]
    prepare(baseline := make_unet())
    prepare(unet := make_unet())
    more = {"added_cond_kwargs": {"image_embeds": [torch.ones(2, 1, WIDTH)]}} if "image" in change else {}
    handle = apply_agentsd(unet, recipe=EACH_KIND["residuals"])
    made = run(unet, Guided(STEPS), after=lambda i: i == 6 and alter(unet), **more)
    expected = run(baseline, Guided(STEPS), after=lambda i: i == 6 and alter(baseline), **more)
    assert (letters(handle)[5], letters(handle)[7]) == ("f", "F")  # both are planned as cached
    torch.testing.assert_close(made[7], expected[7], rtol=0, atol=1e-5)


def test_a_lora_scale_that_a_call_passes_is_part_of_it():
    add_lora(unet := make_unet())
    handle, caller = apply_agentsd(unet, recipe=STEP_CACHING), Guided(STEPS)
    for i in range(STEPS):
        caller(unet, i, cross_attention_kwargs={"scale": 1.0 if i < 6 else 0.5})
    assert letters(handle)[3] == letters(handle)[5] == "f"
    assert letters(handle)[6] == "F"  # which is planned to be cached


EARLY, BY_TURNS, ONE = (lambda i: i < 5, lambda i: i % 2 == 0, lambda i: i == 7)


@pytest.mark.parametrize(
    ("name", "cast"), [("residuals", EARLY), ("residuals", BY_TURNS), ("fast", ONE), ("agentsd", EARLY)]
)
def test_autocast_over_some_calls_alone(name, cast):
    """Nothing raises, and the first call under another dtype computes all layers."""
    handle, caller = apply_agentsd(unet := make_unet(), recipe=EACH_KIND[name]), Caller(STEPS)
    stock, before = make_unet(), None
    for i in range(STEPS):
        with torch.autocast("cpu", torch.bfloat16, enabled=cast(i)):
            made, expected = caller(unet, i), caller(stock, i)
        assert made.isfinite().all()
        assert made.dtype == expected.dtype
        if before is not None and cast(i) != before:
            assert handle.summary()[i] == "F"
        before = cast(i)


class Post(ModelHook):
    """Changes what a layer gives; what comes before it is accelerate's."""

    def post_forward(self, module, output):
        return 1.1 * output


class OffloadAndScale(diffusers.hooks.ModelHook):
    """Of another package, with a name as diffusers has."""

    def post_forward(self, module, output):
        return 1.1 * output


def replaced_on_the_instance():
    hook = ModelHook()
    hook.post_forward = lambda module, output: 1.1 * output
    return hook


ACCELERATE = {
    "post_forward alone": Post,
    "in a sequence": lambda: SequentialHook(ModelHook(), Post()),
    "on the instance": replaced_on_the_instance,
}


@pytest.mark.parametrize("how", [*ACCELERATE, "diffusers"])
def test_a_hook_of_the_hosts_that_another_package_made_sees_each_call(how):
    made = []
    for patched in (False, True):
        unet = make_unet()
        module = unet.mid_block.resnets[0]
        if how == "diffusers":
            diffusers.hooks.HookRegistry.check_if_exists_or_initialize(module).register_hook(
                OffloadAndScale(), "mine"
            )
        else:
            add_hook_to_module(module, ACCELERATE[how]())
        if patched:
            handle = apply_agentsd(unet, recipe=STEP_CACHING)
        with warned("nothing is skipped in this run") if patched else silent():
            made.append(run(unet))
    assert equal(*made)
    assert letters(handle) == "F" * STEPS


def test_attention_that_is_masked_stays_full_and_says_so():
    """In a layer, and in its words, not T-GATE's."""

    def mask(module, args, kwargs):
        return args, kwargs | {"attention_mask": torch.zeros(2, 1, args[0].shape[1])}

    made = []
    for patched in (False, True):
        unet = make_unet()
        layer = unet.up_blocks[2].attentions[0].transformer_blocks[0].attn1
        if patched:
            apply_agentsd(unet, recipe=Recipe(Downsample(), levels=1))
        layer.register_forward_pre_hook(mask, with_kwargs=True)
        with logged() as messages:
            made.append(Caller(STEPS)(unet, 0))
    assert not torch.equal(*made)  # the other layers have fewer keys
    assert [text for text in messages if "attn1 is given an attention mask; it was left untouched" in text]
    assert "T-GATE" not in " ".join(messages)


def test_a_patch_is_removed_whatever_became_of_the_pipelines_unet():
    unet = make_unet()

    class Pipe:
        pass

    pipe = Pipe()
    pipe.unet = unet
    apply_agentsd(pipe, recipe=AGENTSD)
    for other in (lambda *args: unet(*args), None, object()):
        pipe.unet = unet
        apply_agentsd(pipe, recipe=AGENTSD)
        pipe.unet = other
        remove_agentsd(pipe)
        assert not hasattr(unet, "_agentsd")
    with pytest.raises(TypeError, match="has no U-Net"):
        remove_agentsd(object())
