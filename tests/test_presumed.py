"""What a cached step presumes of its call: the table of docs/how_to/combine.md, row by row.

The oracle of each is a U-Net that was never patched, called on what the patched one was called on.
"""

import copy
from functools import partial

import diffusers
import numpy as np
import peft
import pytest
import torch
from callers import Guided, Host, equal, inputs, letters, outputs, sampled
from logs import silent, warned
from pipelines import LORA, ip_adapter_weights
from sampling import SAMPLERS
from tiny import BETAS, WIDTH, make_small_unet, make_unet, may_skip, sdxl_unet, watch_phases

from agentsd import Recipe, ResidualSharing, StepCache, apply_agentsd
from agentsd.attention import Downsample
from agentsd.presumed import _unexplained
from agentsd.recipe import AGENTSD
from agentsd.sampler import Sampler

CACHED = Recipe(steps=StepCache(2))
STEPS = 16
EACH_SECOND, AT_NINE = "Ff" * (STEPS // 2), "FfFfFfFfFFFfFfFf"
"""After a change before call 9 the next one is computed, too, as one state draws no line."""


def patched(unet, caller=None, recipe=CACHED):
    caller = caller or Guided(STEPS)
    return unet, caller, apply_agentsd(caller.pipe(unet), recipe=recipe)


# ---- the latent


KARRAS = "DPM++ 2M, Karras"


@pytest.mark.parametrize(
    ("name", "more", "steps", "images"),
    [
        ("DDIM", {}, STEPS, 1),
        (KARRAS, {}, STEPS, STEPS),
        ("DPM++ 2M SDE", {}, STEPS, 1),
        ("DDIM", {"clip_sample": True}, STEPS, STEPS),  # not linear
        ("Euler, Karras", {}, 8, STEPS),  # large steps
    ],
)
def test_latents_that_no_sampler_made_are_computed(name, more, steps, images):
    """Edit-friendly inversion, score distillation: noise of its own in each call, on an image or several."""
    scheduler, rng = SAMPLERS[name].make(**more), torch.Generator().manual_seed(0)
    scheduler.set_timesteps(steps)
    caller = Guided(steps)
    caller.scheduler, caller.timesteps = scheduler, scheduler.timesteps
    caller.latents = [
        scheduler.add_noise(inputs(i % images)[0], torch.randn(2, 4, 16, 16, generator=rng), t[None])
        for i, t in enumerate(scheduler.timesteps)
    ]
    unet, caller, handle = patched(make_unet(), caller)
    with warned("the latent is not what the sampler makes of the call before"):
        assert equal(outputs(unet, caller), outputs(make_unet(), caller))
    assert set(letters(handle)) == {"F"}


def test_another_image_further_down_the_list_is_computed():
    """One image of a batch is enough."""
    unet, caller, handle = patched(make_unet(), Guided(STEPS, batch=4))
    caller.latents[9:, 1::2] = torch.randn(1, 2, 4, 16, 16, generator=torch.Generator().manual_seed(8))
    with warned("the latent is not what the sampler makes"):
        outs = outputs(unet, caller)
    assert letters(handle) == AT_NINE
    assert torch.equal(outs[9], caller(make_unet(), 9))


def roll(scheduler, i, x):
    return x.roll((5, 3), (-2, -1))


def nudge(scheduler, i, x):
    return x + 0.02 * torch.randn(x.shape, generator=torch.Generator().manual_seed(i))


def mask(scheduler, i, x):
    """Half of the image is a given one's at each noise level, as in inpainting."""
    image, noise = inputs(7)[0][:1], inputs(8)[0][:1]
    if i + 1 < len(scheduler.timesteps):
        x[..., :8, :] = scheduler.add_noise(image, noise, scheduler.timesteps[i + 1][None])[..., :8, :]
    return x


@pytest.mark.parametrize(
    ("change", "name"),
    [(roll, "DDIM"), (nudge, "DDIM"), (nudge, KARRAS), (mask, "DDIM"), (mask, KARRAS)],
)
def test_latents_that_are_nudged_or_masked_are_cached_but_not_rolled_ones(change, name):
    (scheduler := SAMPLERS[name].make()).set_timesteps(STEPS)
    expected = sampled(make_unet(), copy.deepcopy(scheduler), change)
    handle = apply_agentsd(host := Host(make_unet(), scheduler), recipe=CACHED)
    with warned("a roll") if change is roll else silent():
        off = (sampled(host.unet, scheduler, change) - expected).norm() / expected.norm()
    assert letters(handle) == ("F" * STEPS if change is roll else EACH_SECOND)
    assert off < (1e-9 if change is roll else 0.05)


def test_what_is_unexplained_of_a_latent():
    """Half of its variance is that of the latent before, a quarter that of an output of the other pass.

    The other image of the batch is the one before.
    """
    rng = np.random.default_rng(0)
    parts = rng.standard_normal((4, 100_000))
    parts /= np.linalg.norm(parts, axis=1, keepdims=True)
    latent = 0.5**0.5 * parts[0] + 0.5 * parts[1] + 0.5 * parts[2]
    rows = np.stack([latent, 3 * parts[0], parts[1], parts[3]])
    batch = np.stack([rows, rows[[1, 1, 2, 3]]])
    assert _unexplained(batch @ batch.transpose(0, 2, 1)) == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize(
    ("scheduler", "share"),
    [
        (diffusers.EulerDiscreteScheduler(**BETAS), lambda s: s / (1 + s**2) ** 0.5),
        (diffusers.EDMEulerScheduler(), lambda s: s / (0.25 + s**2) ** 0.5),
        (diffusers.FlowMatchEulerDiscreteScheduler(), lambda s: s / (s**2 + (1 - s) ** 2) ** 0.5),
    ],
)
def test_the_share_of_noise_in_a_latent(scheduler, share):
    scheduler.set_timesteps(50)
    sampler = Sampler(scheduler, [float(t) for t in scheduler.timesteps])
    limits, sigmas = sampler.new_noise(True), scheduler.sigmas.tolist()
    assert limits[20] == pytest.approx(0.9 * share(sigmas[20]))
    assert min(limits) >= 0.09
    assert Sampler(None, ()).new_noise(True) == []


# ---- what else a call is given, and the model


def add_lora(unet, **more):
    torch.manual_seed(1)
    unet.add_adapter(peft.LoraConfig(**LORA | more), "one")


def with_lora(**more):
    add_lora(unet := make_unet(), **more)
    return unet


def with_image_prompt():
    (unet := make_unet())._load_ip_adapter_weights([ip_adapter_weights(unet)])
    return unet


def scale_image_prompt(unet):
    for processor in unet.attn_processors.values():
        if hasattr(processor, "scale"):
            processor.scale = [0.1]


def scale_lora_in_place(unet):
    """As a LoRA is swapped for another one of its rank."""
    for name, weight in unet.named_parameters():
        if "lora_A" in name:
            weight.data.copy_(weight.data * 0.5)


def of_mid(unet):
    return unet.mid_block.resnets[0]


@torch.no_grad()
def write(unet):
    of_mid(unet).conv1.weight.mul_(1.5)


def exchange_data(unet):
    of_mid(unet).conv1.weight.data = of_mid(unet).conv1.weight.data * 1.5


def assign(unet):
    unet.load_state_dict({name: one * 1.01 for name, one in unet.state_dict().items()}, assign=True)


MODELS = {
    "a LoRA's scale": (with_lora, lambda unet: unet.set_adapters(["one"], weights=[0.1])),
    "no LoRA": (with_lora, lambda unet: unet.disable_adapters()),
    "a fused LoRA": (with_lora, lambda unet: unet.fuse_lora(lora_scale=0.5)),
    "a new LoRA": (make_unet, add_lora),
    "a LoRA of its rank": (with_lora, scale_lora_in_place),
    "an image prompt's scale": (with_image_prompt, scale_image_prompt),
    "FreeU": (make_unet, lambda unet: unet.enable_freeu(0.9, 0.2, 1.2, 1.4)),
    "weights": (make_unet, write),
    "data": (make_unet, exchange_data),
    "assigned weights": (make_unet, assign),
    "a switch": (make_unet, lambda unet: setattr(of_mid(unet), "output_scale_factor", 1.3)),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_changes_is_noticed(name):
    make, change = MODELS[name]
    unet, caller, handle = patched(make())
    change(stock := make())
    more = {"added_cond_kwargs": {"image_embeds": [torch.ones(2, 1, WIDTH)]}} if "image" in name else {}
    with warned("so a call computes all layers"):
        outs = outputs(unet, caller, after=lambda i: change(unet) if i == 8 else None, **more)
    assert letters(handle) == AT_NINE
    torch.testing.assert_close(outs[9], caller(stock, 9, **more), rtol=0, atol=1e-5)


def conditions(seed):
    """Sizes and pooled text of SDXL."""
    rng = torch.Generator().manual_seed(seed)
    pooled, sizes = (torch.randn(2, width, generator=rng) for width in (WIDTH, 6))
    return {"text_embeds": pooled, "time_ids": sizes}


GIVEN = {
    "class_labels": ({"num_class_embeds": 3}, torch.full((2,), 0), torch.full((2,), 1)),
    "added_cond_kwargs": (None, conditions(0), conditions(1)),
    "encoder_attention_mask": ({}, torch.ones(2, 7), torch.ones(2, 7).tril()),
    "timestep_cond": ({"time_cond_proj_dim": 4}, torch.zeros(2, 4), torch.ones(2, 4)),
    "cross_attention_kwargs": ({}, {"scale": 1.0}, {"scale": 0.5}),
    "encoder_hidden_states": ({}, None, None),
}


@pytest.mark.parametrize(("name", "at"), [("class_labels", 8), *((name, 9) for name in GIVEN)])
def test_an_argument_that_changes_is_noticed(name, at):
    """A tensor, a tensor in a dict, and one that is written into; in a step that is planned to be cached, and
    in one before it."""
    settings, one, other = GIVEN[name]
    unet, stock = ((sdxl_unet() if settings is None else make_unet(**settings)) for _ in range(2))
    unet, caller, handle = patched(unet)
    if settings is None:
        caller.text = torch.randn(2, 7, 2 * WIDTH, generator=torch.Generator().manual_seed(0))
    with warned(f"{name} changed, so a call computes all layers"):
        for i in range(STEPS):
            if i == at and one is None:
                caller.text.mul_(-1)
            given = {} if one is None else {name: other if i >= at else one}
            out = caller(unet, i, **given)
            assert i != at or torch.equal(out, caller(stock, i, **given))
    assert letters(handle) == AT_NINE


def residuals(seed, size=1.0):
    """Those of a ControlNet, new tensors of the same sizes."""
    rng = torch.Generator().manual_seed(seed)
    shapes = [(2, 16, 16, 16)] * 2 + [(2, 16, 8, 8), (2, 32, 8, 8), (2, 32, 4, 4), (2, 32, 4, 4)]
    return {
        "down_block_additional_residuals": [size * torch.randn(shape, generator=rng) for shape in shapes],
        "mid_block_additional_residual": size * torch.randn(2, 32, 4, 4, generator=rng),
    }


@pytest.mark.parametrize("left", [None, 0.4, 0.0])
def test_residuals_that_go_are_noticed(left):
    """They are other tensors in each call, which is no change; `control_guidance_end` gives zeros."""
    unet, caller, handle = patched(make_unet())
    with silent():
        for i in range(9):
            caller(unet, i, **residuals(i))
    with warned("_residual changed" if left is None else "the residuals of a ControlNet"):
        for i in range(9, STEPS):
            caller(unet, i, **({} if left is None else residuals(i, left)))
    assert letters(handle) == AT_NINE


def test_channels_beside_the_latents_are_noticed():
    """A mask and a masked image, which come in a new tensor in each call."""
    own, beside = Guided(STEPS).latents, torch.rand(2, 5, 16, 16, generator=torch.Generator().manual_seed(0))
    for at, symbols in ((STEPS, EACH_SECOND), (9, AT_NINE)):
        unet, caller, handle = patched(make_unet(in_channels=9))
        caller.latents = [torch.cat([x, beside * (1.0 if i < at else 0.5)], 1) for i, x in enumerate(own)]
        outputs(unet, caller)
        assert letters(handle) == symbols


def test_many_conditions_in_a_step_are_not_kept():
    """A classifier by denoising error: one timestep, a new text in each call."""
    unet, caller, handle = patched(make_small_unet())
    with warned("nothing more is skipped in this run"):
        for seed in range(80):
            caller.text = inputs(seed)[1]
            caller(unet, 0)
            assert sum(len(run.memories) for run in handle._hook.runs) <= 32


@pytest.mark.parametrize(("name", "when"), [("mid_block", -1), ("down_blocks.1", 8), ("up_blocks.2", 8)])
def test_a_replaced_block_raises_nothing(name, when):
    """Before a run, and in the middle of one: it says so, and computes all layers."""

    def replace_block(i):
        if i == when:
            parent, _, own = name.rpartition(".")
            held = unet.get_submodule(parent)
            held._modules[own] = copy.deepcopy(held._modules[own])

    unet, caller, handle = patched(make_unet())
    replace_block(-1)
    with warned("has other blocks than when agentsd was applied"):
        outs = outputs(unet, caller, after=replace_block)
    assert "f" not in letters(handle)[when + 1 :]
    assert equal(outs[when + 1 :], outputs(make_unet(), caller)[when + 1 :])


# ---- a call inside a call


@pytest.mark.parametrize(
    ("recipe", "place"),
    [
        (CACHED, "conv_in"),
        (AGENTSD, "conv_out"),
        (Recipe(Downsample()), "up_blocks.2.attentions.1.transformer_blocks.0.attn1"),
    ],
)
def test_a_hook_may_call_the_model_inside_its_call(recipe, place):
    """The inner call is the model's own, and the outer one goes on as without it."""
    inner, busy = [], []
    plain, caller, _ = patched(make_unet(layers_per_block=2), recipe=recipe)
    expected = caller(make_unet(layers_per_block=2), 3)
    made = outputs(plain, caller)
    unet, caller, _ = patched(make_unet(layers_per_block=2), recipe=recipe)

    def call(module, args):
        if not busy:
            busy.append(None)
            inner.append(caller(unet, 3))
            busy.clear()

    unet.get_submodule(place).register_forward_pre_hook(may_skip(call))
    assert equal(outputs(unet, caller), made)
    assert inner
    assert all(torch.equal(one, expected) for one in inner)


# ---- what is kept


def test_eight_runs_are_kept():
    """Each on a list of its own, all of them alive."""
    unet, callers = make_small_unet(), [Guided(STEPS) for _ in range(12)]
    handle = apply_agentsd(unet, recipe=CACHED)
    for caller in callers:
        caller(unet, 0)
    assert len(list(handle._hook.runs)) == 8


INTRABLOCK = [(2, 16, 16, 16), (2, 32, 8, 8), (2, 32, 4, 4)]


@pytest.mark.parametrize("name", ["down_block_additional_residuals", "down_intrablock_additional_residuals"])
def test_residuals_may_be_written_over_by_the_next_call(name):
    """As a CUDA graph writes its outputs: a cached call is computed again on its own."""
    more, shapes = {}, INTRABLOCK
    if name == "down_block_additional_residuals":
        more = {"mid_block_additional_residual": torch.zeros(2, 32, 4, 4)}
        shapes = [tuple(one.shape) for one in residuals(0)[name]]
    made, buffers = [], [torch.zeros(shape) for shape in shapes]
    for written in (False, True):
        unet, caller, handle = patched(make_unet(), recipe=Recipe(steps=StepCache(2, layers=2)))
        outs = []
        for i in range(STEPS):
            rng = torch.Generator().manual_seed(i)
            fresh = [torch.randn(shape, generator=rng) for shape in shapes]
            if written:
                fresh = [buffer.copy_(one) for buffer, one in zip(buffers, fresh, strict=True)]
            outs.append(caller(unet, i, **{name: fresh}, **more))
        made.append(outs)
        assert "corrected" in handle.summary()
    assert equal(*made)


def test_an_adapters_residuals_are_there_when_a_call_is_computed_again():
    """The host takes them off their list as it goes."""
    stock, rng = make_unet(), torch.Generator().manual_seed(1)
    fresh = [2 * torch.randn(shape, generator=rng) for shape in INTRABLOCK]
    unet, caller, _ = patched(make_unet(), recipe=Recipe(steps=StepCache(2, layers=2)))
    for i in range(STEPS):
        made, right = (
            caller(one, i, down_intrablock_additional_residuals=list(fresh)) for one in (unet, stock)
        )
        assert (made - right).norm() < 0.05 * right.norm()


def test_the_least_tokens_are_those_of_the_finest_level():
    """A level of half the side is as large for it: 64 tokens where the finest has 256."""
    for least in (256, 257):
        recipe = Recipe(Downsample(), levels=2, residual=ResidualSharing(least_tokens=least))
        unet, caller, handle = patched(make_unet(), recipe=recipe)
        seen = watch_phases(handle)
        outputs(unet, caller, calls=range(8))
        assert all(("downsample" in words) == (least == 256) for words in seen.values())


# ---- what passes


def test_an_image_that_is_lost_raises_nothing():
    """As half precision overflows: it ends as it does without a patch."""
    unet, caller, handle = patched(make_unet())
    caller.latents = caller.latents * torch.inf
    assert torch.isnan(outputs(unet, caller)[-1]).all()
    assert letters(handle) == EACH_SECOND


@pytest.mark.parametrize(
    ("make", "more"),
    [
        (partial(make_unet, out_channels=8), {}),  # a learned variance, which is no latent
        (partial(with_lora, r=5, lora_alpha=2), {"cross_attention_kwargs": {"scale": 0.7}}),
    ],
)
def test_what_is_no_change_is_cached(make, more):
    """A LoRA's scale is multiplied and divided in each call."""
    unet, caller, handle = patched(make())
    with silent():
        outputs(unet, caller, **more)
    assert letters(handle) == EACH_SECOND
