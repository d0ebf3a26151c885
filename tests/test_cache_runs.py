"""Whose run a call is of, and which step of it; a run knows nothing of the one before."""

import diffusers
import pytest
import torch
from callers import RUN, Caller, Guided, Host, ddim, draw, equal, inputs, letters, outputs
from logs import silent, warned
from recipes import STEP_CACHING
from tiny import BETAS, kept, make_small_unet, make_unet

from agentsd import Recipe, StepCache, apply_agentsd

CACHED = Recipe(steps=StepCache(2))


def loop(unet, scheduler, timesteps, text_of=None):
    """A loop by hand: the U-Net's outputs."""
    latents, text = inputs()
    outs = []
    with torch.no_grad():
        for i, t in enumerate(timesteps):
            given = text_of(i) if text_of else text
            outs.append(unet(scheduler.scale_model_input(latents, t), t, given).sample)
            latents = scheduler.step(outs[-1], t, latents).prev_sample
    return outs


def test_a_prompt_that_changes_in_the_middle_is_computed(make_pipeline):
    handle = apply_agentsd(pipe := make_pipeline(scheduler=ddim(steps_offset=1)), recipe=CACHED)

    def change(pipe, step, t, tensors):
        if step == 4:
            tensors["prompt_embeds"] = tensors["prompt_embeds"].flip(0)
        return tensors

    callback = {"callback_on_step_end": change, "callback_on_step_end_tensor_inputs": ["prompt_embeds"]}
    with warned("encoder_hidden_states changed, so a call computes all layers"):
        draw(pipe, **RUN, **callback)
    assert letters(handle) == "FfFfFFFfFf"


TEXTS = [inputs(seed)[1] for seed in (0, 1)]


@pytest.mark.parametrize("text_of", [lambda i: TEXTS[0].clone(), lambda i: TEXTS[i % 2]])
def test_texts_that_are_new_or_by_turns_keep_the_run_whole(text_of):
    handle, scheduler = apply_agentsd(unet := make_unet(), recipe=STEP_CACHING), ddim(12)
    with warned("encoder_hidden_states changed"):
        made = loop(unet, scheduler, scheduler.timesteps, text_of)
    assert letters(handle) == "F" * 12
    scheduler.set_timesteps(12)
    assert equal(made, loop(make_unet(), scheduler, scheduler.timesteps, text_of))


@pytest.mark.parametrize(("texts", "symbols"), [(2, "FFFfFfFfFf"), (3, "FFFFFFFFFF")])
def test_three_steps_that_follow_from_none_end_a_runs_caching(texts, symbols):
    """Two don't."""
    handle, scheduler = apply_agentsd(unet := make_small_unet(), recipe=CACHED), ddim(10)
    given = [inputs(seed)[1] for seed in range(texts)]
    with warned("encoder_hidden_states changed"):
        loop(unet, scheduler, scheduler.timesteps, lambda i: given[min(i, texts - 1)])
    assert letters(handle) == symbols


def test_as_many_steps_are_computed_after_a_change_as_it_takes_to_extrapolate():
    handle = apply_agentsd(unet := make_small_unet(), recipe=Recipe(steps=StepCache(4)))
    scheduler = ddim(12)
    with warned("encoder_hidden_states changed"):
        loop(unet, scheduler, scheduler.timesteps, lambda i: TEXTS[i >= 5])
    assert letters(handle) == "FfffFFFfFfff"


def test_crops_that_share_a_step_and_a_text_are_computed():
    handle, scheduler = apply_agentsd(unet := make_small_unet(), recipe=CACHED), ddim(10)
    latents, text = inputs()
    with warned("the U-Net is called more than once in a step on the same text"), torch.no_grad():
        for t in scheduler.timesteps:
            for crop in (latents, latents.roll(4, -1)):
                unet(crop, t, text)
    assert letters(handle) == "F" * 20


def test_a_run_without_a_list_of_steps_is_whole():
    unet, caller = make_unet(), Guided()
    caller.timesteps = [int(t) for t in caller.timesteps]
    apply_agentsd(unet, recipe=CACHED)
    with warned(r"pass elements of scheduler.timesteps to the U-Net"):
        outs = outputs(unet, caller)
    assert equal(outs, outputs(make_unet(), caller))


def test_under_gradients_a_call_is_whole():
    unet, baseline, caller = make_unet(), make_unet(), Guided()
    handle = apply_agentsd(unet, recipe=CACHED)
    with warned("gradients are on"):
        for model in (unet, baseline):
            for i in range(3):
                out = model(caller.latents[i], caller.timesteps[i], caller.text).sample
                out.square().mean().backward()
    for ours, theirs in zip(unet.parameters(), baseline.parameters(), strict=True):
        assert (ours.grad is None and theirs.grad is None) or torch.equal(ours.grad, theirs.grad)
    assert letters(handle) == "FFF"
    assert not kept(handle)


def test_runs_that_take_turns_in_a_thread_are_runs_of_their_own():
    """As in an async server: each call is as in a run alone, and nothing is said."""
    unet, (one, other) = make_unet(), (ddim(10), ddim(12))
    host = Host(unet, one)
    host.another = other
    handle = apply_agentsd(host, recipe=STEP_CACHING)
    twins, summaries = [make_unet(), make_unet()], []
    hosts = [Host(twin, scheduler) for twin, scheduler in zip(twins, (one, other), strict=True)]
    alone = [apply_agentsd(each, recipe=STEP_CACHING) for each in hosts]
    given = [inputs(0), inputs(1)]
    with silent(), torch.no_grad():
        for steps in zip(one.timesteps, other.timesteps, strict=False):
            summaries.clear()
            for t, twin, (latents, text) in zip(steps, twins, given, strict=True):
                assert torch.equal(unet(latents, t, text).sample, twin(latents, t, text).sample)
                summaries.append(handle.summary())
    assert summaries == [one.summary() for one in alone]
    assert "corrected" in summaries[0]


def test_corrections_are_by_the_schedulers_of_the_pipeline_that_is_patched(make_pipeline):
    pipe = make_pipeline(scheduler=ddim())
    other, third = (diffusers.StableDiffusionPipeline.from_pipe(pipe) for _ in range(2))
    other.scheduler = diffusers.PNDMScheduler(**BETAS, skip_prk_steps=True)
    third.scheduler = ddim(prediction_type="v_prediction")
    made = {}
    for patched in (pipe, other, third):
        handle = apply_agentsd(patched, recipe=CACHED)
        with warned("not those of a scheduler that is known"):
            for name, run in {"eps": pipe, "PLMS": other, "v": third}.items():
                image = draw(run, **RUN)
                own = run is patched
                assert torch.equal(made.setdefault((name, own), image), image)
                assert ("corrected" in handle.summary()) == own


def test_a_strided_loop_is_planned_by_its_own_stride():
    unet, twin, scheduler = make_unet(), make_unet(), ddim(40)
    handle = apply_agentsd(host := Host(unet, scheduler), recipe=CACHED)
    with warned("skip some of the scheduler's list"):
        loop(host.unet, scheduler, scheduler.timesteps[::3])
    assert letters(handle).startswith("FFfFfF")
    assert "corrected" not in handle.summary()
    caller = Caller(steps=20)
    for i in (0, 3, 4, 9, 11, 18):  # whatever the jump, what follows it is computed
        assert torch.equal(caller(unet, i), caller(twin, i))


ORDERS = {
    "reversed": lambda t: t.flip(0),
    "mixed": lambda t: t[[0, 9, 1, 8, 2, 7, 3, 6]],
    "from the middle, then the start": lambda t: [*t[5:].tolist(), *t[:5].tolist()],
}


@pytest.mark.parametrize("order", ORDERS)
def test_a_list_that_is_walked_in_another_order(order):
    """It is a run of its own, whose first three steps are computed; numbers on no known list stay whole."""
    unet, scheduler = make_unet(), ddim(10)
    apply_agentsd(unet, recipe=STEP_CACHING)
    asked = ORDERS[order](scheduler.timesteps)
    made, baseline = loop(unet, scheduler, asked), loop(make_unet(), scheduler, asked)
    assert equal(made[:3], baseline[:3])
    assert order != "from the middle, then the start" or equal(made, baseline)


def test_a_timestep_off_the_list_is_told_and_computed():
    scheduler, (latents, text) = ddim(10), inputs()
    host = Host(unet := make_unet(), scheduler)
    handle = apply_agentsd(host, recipe=CACHED)
    with torch.no_grad():
        for t in (900, 800):
            unet(latents, t, text)
        with warned("is not one of the scheduler's list, so its call computes"):
            unet(latents, 777, text)
        unet(latents, 700, text)
    assert letters(handle) == "FfFF"


def test_rounded_timesteps_that_repeat_are_steps_of_their_own():
    """Each is planned, and corrected, by its own noise level."""
    scheduler = diffusers.UniPCMultistepScheduler(**BETAS, use_karras_sigmas=True)
    scheduler.set_timesteps(steps := 45)
    assert len(set(scheduler.timesteps.tolist())) < steps
    host = Host(unet := make_small_unet(), scheduler)
    handle = apply_agentsd(host, recipe=STEP_CACHING)
    latent, text = inputs()
    with silent(), torch.no_grad():
        for t in scheduler.timesteps:
            latent = scheduler.step(unet(latent, t, text).sample, t, latent).prev_sample
    letters = "".join(kind.letter for kind in handle.last_run)
    # four full steps; then one in two, and of the second half one in three
    assert letters == "".join("F" if full else "f" for full in STEP_CACHING.steps.full_steps(steps))
    cached = letters.rstrip("f").count("f")
    assert f"{cached} corrected" in handle.summary()
