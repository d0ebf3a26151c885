"""What a cached step presumes of its call: the table of docs/how_to/combine.md, row by row.

The oracle of each is a U-Net that was never patched, called on what the patched one was called on.
"""

import copy

import diffusers
import numpy as np
import peft
import pytest
import torch
from callers import Guided, Host, ddim, equal, inputs, letters, outputs
from logs import silent, warned
from pipelines import LORA
from recipes import STEP_CACHING
from tiny import BETAS, WIDTH, make_controlnet, make_small_unet, make_unet, may_skip, sdxl_unet, watch_phases

from agentsd import Recipe, ResidualSharing, StepCache, apply_agentsd, remove_agentsd
from agentsd.attention import Downsample
from agentsd.presumed import _unexplained
from agentsd.recipe import AGENTSD
from agentsd.sampler import Sampler

CACHED = Recipe(steps=StepCache(2))
STEPS = 16


@torch.no_grad()
def loop(unet, scheduler, between=lambda i, x: x, guidance=3.0, **more):
    """Guided sampling by hand, with something done to the latent after each step; returns all latents."""
    noise, text = inputs(3)
    x, latents = noise[:1] * scheduler.init_noise_sigma, []
    for i, t in enumerate(scheduler.timesteps):
        given = scheduler.scale_model_input(torch.cat([x] * 2), t)
        one, other = unet(given, t, encoder_hidden_states=text, **more).sample.chunk(2)
        x = between(i, scheduler.step(one + guidance * (other - one), t, x)[0])
        latents.append(x)
    return latents


def handled(scheduler, between=lambda i, x: x, unet=None, **more):
    """The letters of a patched loop's calls, and how far its last latent is from the unpatched one's."""
    stock = loop(copy.deepcopy(unet or make_unet()), copy.deepcopy(scheduler), between, **more)
    handle = apply_agentsd(host := Host(unet := unet or make_unet(), scheduler), recipe=CACHED)
    made = loop(unet, scheduler, between, **more)
    assert host.scheduler is scheduler
    return letters(handle), float((made[-1] - stock[-1]).norm() / stock[-1].norm())


# ---- the latent


SCHEDULERS = {
    "DDIM": lambda: ddim(STEPS),
    "DPM++ 2M": lambda: diffusers.DPMSolverMultistepScheduler(**BETAS, use_karras_sigmas=True),
    "DPM++ 2M SDE": lambda: diffusers.DPMSolverMultistepScheduler(**BETAS, algorithm_type="sde-dpmsolver++"),
    "not linear": lambda: diffusers.DDIMScheduler(**BETAS, clip_sample=True),
}


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("image", [1, STEPS], ids=["one image", "an image a call"])
def test_latents_that_no_sampler_made_are_computed(name, image):
    """Edit-friendly inversion, score distillation: noise of its own in each call."""
    scheduler = SCHEDULERS[name]()
    scheduler.set_timesteps(STEPS)
    text, rng = inputs(5)[1], torch.Generator().manual_seed(0)
    latents = []
    for i, t in enumerate(scheduler.timesteps):
        noise = torch.randn(2, 4, 16, 16, generator=rng)
        latents.append(scheduler.add_noise(inputs(i % image)[0], noise, t[None]))
    stock, unet = make_unet(), make_unet()
    handle = apply_agentsd(host := Host(unet, scheduler), recipe=STEP_CACHING)
    with warned("the latent is not what the sampler makes of the call before"), torch.no_grad():
        for x, t in zip(latents, scheduler.timesteps, strict=True):
            assert torch.equal(unet(x, t, text).sample, stock(x, t, text).sample)
    assert letters(handle) == "F" * STEPS
    del host


def test_another_image_further_down_the_list_is_computed():
    """One image of a batch is enough."""
    unet, caller = make_unet(), Guided(STEPS, batch=4)
    caller.latents[9:, 1::2] = torch.randn(
        2, 4, 16, 16, generator=torch.Generator().manual_seed(8)
    ).unsqueeze(0)
    handle = apply_agentsd(caller.pipe(unet), recipe=CACHED)
    with warned("the latent is not what the sampler makes"):
        outs = outputs(unet, caller)
    assert letters(handle) == "FfFfFfFfFFFfFfFf"  # the next is computed too, as one state draws no line
    assert torch.equal(outs[9], caller(make_unet(), 9))


def roll(i, x):
    return x.roll((5, 3), (-2, -1))


def nudge(i, x):
    return x + 0.02 * torch.randn(x.shape, generator=torch.Generator().manual_seed(i))


def mask(scheduler):
    """Half of the image is a given one's at each noise level, as in inpainting."""
    image, noise = inputs(7)[0][:1], inputs(8)[0][:1]

    def blend(i, x):
        if i + 1 < len(scheduler.timesteps):
            x[..., :8, :] = scheduler.add_noise(image, noise, scheduler.timesteps[i + 1][None])[..., :8, :]
        return x

    return blend


def test_a_latent_that_is_rolled_in_each_step_is_computed():
    with warned("a roll"):
        assert handled(ddim(STEPS), roll) == ("F" * STEPS, 0.0)


@pytest.mark.parametrize("name", ["DDIM", "DPM++ 2M"])
@pytest.mark.parametrize("change", ["nudged", "masked"])
def test_latents_that_are_nudged_or_masked_are_cached(name, change):
    (scheduler := SCHEDULERS[name]()).set_timesteps(STEPS)
    with silent():
        symbols, off = handled(scheduler, nudge if change == "nudged" else mask(scheduler))
    assert symbols == "Ff" * (STEPS // 2)
    assert off < 0.05


def test_what_is_unexplained_of_a_latent():
    """Half of its variance is that of the latent before, a quarter that of an output of the other pass."""
    rng = np.random.default_rng(0)
    parts = rng.standard_normal((4, 100_000))
    parts /= np.linalg.norm(parts, axis=1, keepdims=True)
    latent = 0.5**0.5 * parts[0] + 0.5 * parts[1] + 0.5 * parts[2]
    rows = np.stack([latent, 3 * parts[0], parts[1], parts[3]])
    found = _unexplained((rows @ rows.T)[None])
    assert found == pytest.approx(0.5, abs=0.01)


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


# ---- what else a call is given


def changed(unet, given, at=9, change=None, caller=None):
    """The letters of a run whose call at a place and those after it are given something else."""
    caller = caller or Guided(STEPS)
    handle = apply_agentsd(caller.pipe(unet), recipe=CACHED)
    stock = copy.deepcopy(unet)
    remove_agentsd(stock)
    for i in range(STEPS):
        more = (change or given) if i >= at else given
        out = caller(unet, i, **more)
        if i == at:
            assert torch.equal(out, caller(stock, i, **more))
    return letters(handle)


def residuals(seed, size=1.0):
    """Those of a ControlNet, new tensors of the same sizes."""
    rng = torch.Generator().manual_seed(seed)
    shapes = [(2, 16, 16, 16)] * 2 + [(2, 16, 8, 8), (2, 32, 8, 8), (2, 32, 4, 4), (2, 32, 4, 4)]
    return {
        "down_block_additional_residuals": [size * torch.randn(shape, generator=rng) for shape in shapes],
        "mid_block_additional_residual": size * torch.randn(2, 32, 4, 4, generator=rng),
    }


AT_NINE = "FfFfFfFfFFFfFfFf"


def test_a_class_that_changes_is_noticed():
    """In a step that is planned to be cached, and in one before it, as one state draws no line."""
    one, other = ({"class_labels": torch.full((2,), label)} for label in (0, 1))
    for at in (8, 9):
        with warned("class_labels changed, so a call computes all layers"):
            assert changed(make_unet(num_class_embeds=3), one, at, other) == AT_NINE


def test_sizes_and_pooled_text_of_sdxl_are_noticed():
    def conditions(seed):
        rng = torch.Generator().manual_seed(seed)
        pooled, sizes = (torch.randn(2, width, generator=rng) for width in (WIDTH, 6))
        return {"added_cond_kwargs": {"text_embeds": pooled, "time_ids": sizes}}

    caller = Guided(STEPS)
    caller.text = torch.randn(2, 7, 2 * WIDTH, generator=torch.Generator().manual_seed(0))
    one, other = conditions(0), conditions(1)
    with warned("added_cond_kwargs changed"):
        assert changed(sdxl_unet(), one, change=other, caller=caller) == AT_NINE


@pytest.mark.parametrize("name", ["encoder_attention_mask", "timestep_cond", "cross_attention_kwargs"])
def test_any_argument_that_changes_is_noticed(name):
    """Whatever its name: a tensor, a tensor in a dict, and one that is written into."""
    unet = make_unet(time_cond_proj_dim=4) if name == "timestep_cond" else make_unet()
    values = {
        "encoder_attention_mask": [torch.ones(2, 7), torch.ones(2, 7).tril()],
        "timestep_cond": [torch.zeros(2, 4), torch.ones(2, 4)],
        "cross_attention_kwargs": [{"scale": 1.0}, {"scale": 0.5}],
    }
    one, other = ({name: value} for value in values[name])
    with warned(f"{name} changed"):
        assert changed(unet, one, change=other) == AT_NINE


def test_a_text_that_is_written_into_is_noticed():
    unet, caller = make_unet(), Guided(STEPS)
    handle = apply_agentsd(caller.pipe(unet), recipe=CACHED)
    with warned("encoder_hidden_states changed"):
        outputs(unet, caller, after=lambda i: caller.text.mul_(-1) if i == 8 else None)
    assert letters(handle) == AT_NINE


@pytest.mark.parametrize("gone", ["none", "zero", "half"])
def test_residuals_that_go_are_noticed(gone):
    """`control_guidance_end` gives zeros; they are other tensors in each call, which is no change."""
    unet, caller = make_unet(), Guided(STEPS)
    handle = apply_agentsd(caller.pipe(unet), recipe=CACHED)
    for i in range(STEPS):
        given = residuals(i, size=1.0 if i < 9 else {"zero": 0.0, "half": 0.4, "none": 0.0}[gone])
        caller(unet, i, **({} if gone == "none" and i >= 9 else given))
    assert letters(handle) == AT_NINE


def test_a_controlnet_that_ends_is_noticed(make_pipeline):
    cls, net = diffusers.StableDiffusionControlNetPipeline, make_controlnet()
    pipe = make_pipeline(cls=cls, controlnet=net, scheduler=ddim())
    handle = apply_agentsd(pipe, recipe=CACHED)
    run = {"num_inference_steps": STEPS, "output_type": "latent", "image": torch.rand(1, 3, 32, 32)}
    with warned("the residuals of a ControlNet"):
        pipe("a cat", control_guidance_end=9 / STEPS, **run)
    assert letters(handle) == AT_NINE
    with silent():
        pipe("a cat", **run)
    assert letters(handle) == "Ff" * (STEPS // 2)


def test_channels_beside_the_latents_are_noticed():
    """A mask and a masked image, which come in a new tensor in each call."""
    unet, caller = make_unet(in_channels=9), Guided(STEPS)
    beside = torch.rand(2, 5, 16, 16, generator=torch.Generator().manual_seed(0))
    own = caller.latents
    for at, symbols in ((STEPS, "Ff" * (STEPS // 2)), (9, AT_NINE)):
        caller.latents = [torch.cat([x, beside * (1.0 if i < at else 0.5)], 1) for i, x in enumerate(own)]
        with apply_agentsd(caller.pipe(unet), recipe=CACHED) as handle:
            outputs(unet, caller)
        assert letters(handle) == symbols


def test_many_conditions_in_a_step_are_not_kept():
    """A classifier by denoising error: one timestep, a new text in each call."""
    unet, caller = make_small_unet(), Guided(STEPS)
    handle = apply_agentsd(caller.pipe(unet), recipe=CACHED)
    with warned("nothing more is skipped in this run"), torch.no_grad():
        for seed in range(80):
            unet(caller.latents[0], caller.timesteps[0], inputs(seed)[1])
            assert sum(len(run.memories) for run in handle._hook.runs) <= 32


# ---- the model


def swap_in_place(unet):
    """As a LoRA is swapped for another one of its rank."""
    for name, weight in unet.named_parameters():
        if "lora_A" in name:
            weight.data.copy_(weight.data * 0.5)


def swap_data(unet):
    weight = unet.mid_block.resnets[0].conv1.weight
    weight.data = weight.data * 1.5


def assign(unet):
    unet.load_state_dict({name: one * 1.01 for name, one in unet.state_dict().items()}, assign=True)


def switch(unet):
    unet.mid_block.resnets[0].output_scale_factor = 1.3


MODELS = {"the same rank's LoRA": swap_in_place, "data": swap_data, "assign": assign, "a switch": switch}


@pytest.mark.parametrize("how", MODELS)
def test_a_model_that_changes_is_noticed(how):
    unet, caller = make_unet(), Guided(STEPS)
    torch.manual_seed(1)
    unet.add_adapter(peft.LoraConfig(**LORA | {"init_lora_weights": False}), "one")
    handle = apply_agentsd(caller.pipe(unet), recipe=CACHED)
    with warned("so a call computes all layers"):
        outputs(unet, caller, after=lambda i: MODELS[how](unet) if i == 8 else None)
    assert letters(handle) == AT_NINE


def replace_block(unet, name):
    parent, _, own = name.rpartition(".")
    held = unet.get_submodule(parent)
    held._modules[own] = copy.deepcopy(held._modules[own])


@pytest.mark.parametrize("name", ["mid_block", "down_blocks.1", "up_blocks.0", "up_blocks.2"])
@pytest.mark.parametrize("when", [-1, 8])
def test_a_replaced_block_raises_nothing(name, when):
    """Before a run, and in the middle of one: it says so, and computes all layers."""
    unet, caller = make_unet(), Guided(STEPS)
    stock = outputs(unet, caller)
    handle = apply_agentsd(caller.pipe(unet), recipe=CACHED)
    if when < 0:
        replace_block(unet, name)
    with warned("has other blocks than when agentsd was applied"):
        outs = outputs(unet, caller, after=lambda i: replace_block(unet, name) if i == when else None)
    assert "f" not in letters(handle)[when + 1 :]
    assert equal(outs[when + 1 :], stock[when + 1 :])


# ---- the list


@pytest.mark.parametrize("order", [lambda n: torch.randperm(n), lambda n: torch.arange(n).flip(0)])
def test_timesteps_that_go_up_are_no_run(order):
    torch.manual_seed(0)
    unet, stock, caller = make_unet(), make_unet(), Guided(STEPS)
    caller.timesteps = caller.timesteps[order(STEPS)]
    handle = apply_agentsd(unet, recipe=CACHED)
    with warned("the timesteps go up"):
        assert equal(outputs(unet, caller), outputs(stock, caller))
    assert letters(handle) == "F" * STEPS


# ---- a call inside a call


@pytest.mark.parametrize("recipe", [CACHED, AGENTSD, Recipe(Downsample())])
@pytest.mark.parametrize(
    "place", ["conv_in", "conv_out", "up_blocks.2.attentions.1.transformer_blocks.0.attn1"]
)
def test_a_hook_may_call_the_model_inside_its_call(recipe, place):
    """The inner call is the model's own, and the outer one goes on as without it."""
    caller, made, inner, expected = Guided(STEPS), [], [], None
    for nested in (False, True):
        unet = make_unet(layers_per_block=2)
        expected = expected if nested else caller(unet, 3)
        apply_agentsd(caller.pipe(unet), recipe=recipe)
        busy = []

        def call(module, args, unet=unet, busy=busy):
            if not busy:
                busy.append(None)
                inner.append(caller(unet, 3))
                busy.clear()

        if nested:
            unet.get_submodule(place).register_forward_pre_hook(may_skip(call))
        made.append(outputs(unet, caller))
    assert equal(*made)
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


@pytest.mark.parametrize("name", ["down_block_additional_residuals", "down_intrablock_additional_residuals"])
def test_residuals_may_be_written_over_by_the_next_call(name):
    """As a CUDA graph writes its outputs: a cached call is computed again on its own."""
    made = []
    shapes = [(2, 16, 16, 16), (2, 32, 8, 8), (2, 32, 4, 4)]
    if name == "down_block_additional_residuals":
        shapes = [tuple(one.shape) for one in residuals(0)[name]]
    buffers = [torch.zeros(shape) for shape in shapes]
    for written in (False, True):
        unet, caller = make_unet(), Guided(STEPS)
        handle = apply_agentsd(caller.pipe(unet), recipe=Recipe(steps=StepCache(2, layers=2)))
        outs = []
        for i in range(STEPS):
            rng = torch.Generator().manual_seed(i)
            fresh = [torch.randn(shape, generator=rng) for shape in shapes]
            if written:
                fresh = [buffer.copy_(one) for buffer, one in zip(buffers, fresh, strict=True)]
            more = {"mid_block_additional_residual": torch.zeros(2, 32, 4, 4)} if "block_add" in name else {}
            outs.append(caller(unet, i, **{name: list(fresh)}, **more))
        made.append(outs)
        assert "corrected" in handle.summary()
    assert equal(*made)


def test_an_adapters_residuals_are_there_when_a_call_is_computed_again():
    """The host takes them off their list as it goes."""
    unet, stock, caller = make_unet(), make_unet(), Guided(STEPS)
    rng = torch.Generator().manual_seed(1)
    fresh = [
        2 * torch.randn(shape, generator=rng) for shape in [(2, 16, 16, 16), (2, 32, 8, 8), (2, 32, 4, 4)]
    ]
    apply_agentsd(caller.pipe(unet), recipe=Recipe(steps=StepCache(2, layers=2)))
    for i in range(STEPS):
        made, right = (
            caller(one, i, down_intrablock_additional_residuals=list(fresh)) for one in (unet, stock)
        )
        assert (made - right).norm() < 0.05 * right.norm()


def test_the_least_tokens_are_those_of_the_finest_level():
    """A level of half the side is as large for it: 64 tokens where the finest has 256."""
    seen = {}
    for least in (256, 257):
        unet, caller = make_unet(), Guided(STEPS)
        recipe = Recipe(Downsample(), levels=2, residual=ResidualSharing(least_tokens=least))
        seen[least] = watch_phases(apply_agentsd(caller.pipe(unet), recipe=recipe))
        for i in range(8):
            caller(unet, i)
    assert all("downsample" in words for words in seen[256].values())
    assert all("downsample" not in words for words in seen[257].values())


# ---- what passes


def test_an_image_that_is_lost_raises_nothing():
    """As half precision overflows: it ends as it does without a patch."""
    unet, caller = make_unet(), Guided(STEPS)
    handle = apply_agentsd(caller.pipe(unet), recipe=CACHED)
    caller.latents = caller.latents * torch.inf
    assert torch.isnan(outputs(unet, caller)[-1]).all()
    assert letters(handle) == "Ff" * (STEPS // 2)


def test_a_learned_variance_is_no_latent():
    """Four channels in, eight out."""
    unet, caller = make_unet(out_channels=8), Guided(STEPS)
    handle = apply_agentsd(caller.pipe(unet), recipe=CACHED)
    outputs(unet, caller)
    assert letters(handle) == "Ff" * (STEPS // 2)


@pytest.mark.parametrize("name", ["KDPM2DiscreteScheduler", "KDPM2AncestralDiscreteScheduler"])
@pytest.mark.parametrize("steps", [10, 28, 50])
def test_timesteps_that_are_rounded_go_down(name, steps):
    scheduler = getattr(diffusers, name)(**BETAS, use_karras_sigmas="Ancestral" not in name)
    scheduler.set_timesteps(steps)
    unet, caller = make_small_unet(), Guided(len(scheduler.timesteps), size=(8, 8))
    caller.scheduler, caller.timesteps = scheduler, scheduler.timesteps
    handle = apply_agentsd(caller.pipe(unet), recipe=CACHED)
    for i in range(4):
        caller(unet, i)
    assert "f" in letters(handle)


def test_a_loras_scale_may_be_multiplied_and_divided_in_each_call():
    unet, caller = make_unet(), Guided(STEPS)
    unet.add_adapter(peft.LoraConfig(**LORA | {"r": 5, "lora_alpha": 2}), "one")
    handle = apply_agentsd(caller.pipe(unet), recipe=CACHED)
    with silent():
        outputs(unet, caller, cross_attention_kwargs={"scale": 0.7})
    assert letters(handle) == "Ff" * (STEPS // 2)


def test_eight_large_steps_are_looked_at():
    scheduler = diffusers.EulerDiscreteScheduler(**BETAS, use_karras_sigmas=True)
    scheduler.set_timesteps(8)
    unet, caller = make_unet(), Guided(8)
    caller.scheduler, caller.timesteps = scheduler, scheduler.timesteps
    caller.latents = torch.randn(8, 1, 4, 16, 16, generator=torch.Generator().manual_seed(1)).repeat(
        1, 2, 1, 1, 1
    )
    handle = apply_agentsd(caller.pipe(unet), recipe=CACHED)
    with warned("the latent is not what the sampler makes"):
        outputs(unet, caller)
    assert letters(handle) == "F" * 8
