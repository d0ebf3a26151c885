"""Faults that were found and mended: what others put on, around or into a U-Net.

The rule: what agentsd can't prove to be unaffected by a skipped layer or a corrected call is not skipped or
corrected, and is named; attention goes on. The oracle is what the other saw and gave without agentsd.
"""

import functools

import diffusers
import peft
import pytest
import torch
from callers import Caller, Guided
from diffusers.models import attention_processor
from diffusers.models.attention_processor import AttnProcessor2_0
from logs import logged, silent, warned
from pipelines import ip_adapter_weights
from tiny import BETAS, WIDTH, make_unet, may_skip, snapshot
from torch.utils._pytree import tree_leaves

from agentsd import Agents, Downsample, Recipe, ResidualSharing, StepCache, apply_agentsd, remove_agentsd
from agentsd.patch import handle_of
from agentsd.recipe import MODES, PAPER, STEP_CACHING

STEPS = 12
RECIPES = {
    **MODES,
    "residuals": Recipe(Downsample(), residual=ResidualSharing(), steps=StepCache(2)),
    "agents": Recipe(Agents()),
}


def run(unet, caller=None, after=lambda i: None, **more):
    """The outputs of a run's calls."""
    caller, outputs = caller or Caller(STEPS), []
    for i in range(STEPS):
        outputs.append(caller(unet, i, **more))
        after(i)
    return outputs


def equal(made, expected):
    return all(map(torch.equal, made, expected))


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
    apply_agentsd(other, recipe=PAPER)
    unet.mid_block.register_forward_hook(lambda *args: seen(*args))
    handle = apply_agentsd(unet, recipe=PAPER)
    with silent():
        assert equal(run(unet), run(other))
    assert {kind.attention for kind in handle.last_run} == {"operator"}
    assert len(seen.shapes) == STEPS


@pytest.mark.parametrize("name", ["agentsd", "step-caching", "residuals"])
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
    unet, seen = make_unet(), Seen()
    handle = apply_agentsd(unet, recipe=STEP_CACHING)
    WAYS[way](unet, seen)
    with warned("has a hook .*cached steps are not corrected"):
        run(unet)
    assert len(seen.shapes) == STEPS
    assert "f" in handle.summary()
    assert "corrected" not in handle.summary()


def test_a_hook_may_say_that_it_can_miss_calls():
    unet, seen = make_unet(), Seen()
    handle = apply_agentsd(unet, recipe=STEP_CACHING)
    unet.conv_in.register_forward_hook(may_skip(lambda *args: seen(*args)))
    unet.register_forward_hook(may_skip(lambda *args: None))
    with silent():
        run(unet)
    assert "corrected" in handle.summary()
    assert len(seen.shapes) > STEPS


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
    handle = apply_agentsd(unet, recipe=RECIPES[name])
    for attn in (layer.attn for layer in handle._layers.attention_layers):
        assert not isinstance(attn.processor, torch.nn.Module)
        assert attn.processor.__class__ is getattr(attention_processor, kind)
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
        apply_agentsd(unet, recipe=PAPER)


LORA = {"r": 2, "target_modules": ["to_q", "to_v"], "init_lora_weights": False}


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
        assert "corrected" in handle.summary()
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

    apply_agentsd(unet := of_class(Keyword), recipe=PAPER)
    caller, plain = Caller(STEPS), make_unet()
    with warned("has no argument"), torch.no_grad():
        for i in range(STEPS):
            made = unet(x=caller.latents[i], t=caller.timesteps[i], text=caller.text).sample
            assert torch.equal(made, caller(plain, i))


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
    "another LoRA": (add_lora, lambda unet: unet.set_adapters(["two"], weights=[1.0])),
    "no LoRA": (add_lora, lambda unet: unet.disable_adapters()),
    "a fused LoRA": (add_lora, lambda unet: unet.fuse_lora(lora_scale=0.5)),
    "a new LoRA": (lambda unet: None, add_lora),
    "an image prompt's scale": (load_image_prompt, scale_image_prompt),
    "FreeU": (lambda unet: None, lambda unet: unet.enable_freeu(0.9, 0.2, 1.2, 1.4)),
    "weights": (lambda unet: None, write_weights),
}


EACH_SECOND = {
    "step-caching": Recipe(steps=StepCache(2)),
    "residuals": Recipe(Downsample(), residual=ResidualSharing(), steps=StepCache(2)),
}


@pytest.mark.parametrize("name", EACH_SECOND)
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_in_a_run_is_noticed(change, name):
    """The call after it computes all layers, whatever was planned: as the model gives it without agentsd."""
    prepare, alter = CHANGES[change]
    prepare(baseline := make_unet())
    prepare(unet := make_unet())
    more = {"added_cond_kwargs": {"image_embeds": [torch.ones(2, 1, WIDTH)]}} if "image" in change else {}
    handle = apply_agentsd(unet, recipe=EACH_SECOND[name])
    made = run(unet, Guided(STEPS), lambda i: i == 6 and alter(unet), **more)
    expected = run(baseline, Guided(STEPS), lambda i: i == 6 and alter(baseline), **more)
    letters = handle.summary().split()[0]
    assert (letters[5], letters[7]) == ("f", "F")  # both are planned as cached
    torch.testing.assert_close(made[7], expected[7], rtol=0, atol=1e-5)
    run(unet, Guided(STEPS), **more)
    assert "f" in handle.summary().split()[0]


def test_a_lora_scale_that_a_call_passes_is_part_of_it():
    add_lora(unet := make_unet())
    handle, caller = apply_agentsd(unet, recipe=STEP_CACHING), Guided(STEPS)
    for i in range(STEPS):
        caller(unet, i, cross_attention_kwargs={"scale": 1.0 if i < 7 else 0.5})
    letters = handle.summary().split()[0]
    assert letters[4] == "f"
    assert letters[7] == "F"


@pytest.mark.parametrize("name", ["step-caching", "residuals", "agentsd", "paper"])
@pytest.mark.parametrize("cast", [lambda i: i < 5, lambda i: i >= 6, lambda i: i % 2 == 0, lambda i: i == 7])
def test_autocast_over_some_calls_alone(name, cast):
    """Nothing raises, and the first call under another dtype computes all layers."""
    handle, caller = apply_agentsd(unet := make_unet(), recipe=RECIPES[name]), Caller(STEPS)
    stock, before = make_unet(), None
    for i in range(STEPS):
        with torch.autocast("cpu", torch.bfloat16, enabled=cast(i)):
            made, expected = caller(unet, i), caller(stock, i)
        assert made.isfinite().all()
        assert made.dtype == expected.dtype
        if before is not None and cast(i) != before:
            assert handle.summary()[i] == "F"
        before = cast(i)


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
    for recipe in (PAPER, *recipes):
        apply_agentsd(unet := make_unet(), recipe=recipe)
        split(unet)
        with warned("tokens of 1 images where the latent's size gives 256 of 2; it was left untouched"):
            made = run(unet)
        # the layer in parts computes full attention, as it would without a patch
        expected = apply_agentsd(twin := make_unet(), recipe=recipe)
        for state, layer in zip(expected._layers.states, expected._layers.attention_layers, strict=True):
            if state.name.startswith(("down_blocks.0.attentions.0", "up_blocks.2.attentions.0")):
                layer.attn.set_processor(type("Whole", (AttnProcessor2_0,), {"agentsd_may_skip": True})())
        torch.testing.assert_close(made, run(twin), rtol=0, atol=1e-5)


def test_a_trace_is_the_models_own():
    apply_agentsd(unet := make_unet(), recipe=PAPER)
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


def test_video_latents_with_frames_first():
    """Stable Video Diffusion's are (B, F, C, H, W)."""
    from agentsd.hosts.models import frames_of

    class Config:
        num_frames = 14

    assert frames_of(Config(), torch.empty(2, 14, 8, 4, 4)) == 14
    assert frames_of(diffusers.DDIMScheduler(**BETAS).config, torch.empty(2, 4, 7, 4, 4)) == 7
    assert frames_of(None, torch.empty(2, 4, 4, 4)) == 1
