"""Whose run a call is of, and which step of it; a run knows nothing of the one before."""

import diffusers
import pytest
import torch
from callers import RUN, Caller, Guided, Host, ddim, draw, equal, inputs, letters, loop, outputs
from logs import silent, warned
from recipes import STEP_CACHING
from tiny import BETAS, kept, make_small_unet, make_unet

from agentsd import Recipe, StepCache, apply_agentsd

CACHED = Recipe(steps=StepCache(2))
TEXTS = [inputs(seed)[1] for seed in range(3)]


@pytest.mark.parametrize(
    ("interval", "text_of", "symbols"),
    [
        (2, lambda i: TEXTS[0].clone(), "F" * 12),
        (2, lambda i: TEXTS[i % 2], "F" * 12),
        (2, lambda i: TEXTS[min(i, 2)], "F" * 12),
        (2, lambda i: TEXTS[min(i, 1)], "FFFfFfFfFfFf"),
        (4, lambda i: TEXTS[i >= 5], "FfffFFFfFfff"),  # as many are computed as it takes to extrapolate
    ],
)
def test_texts_that_change(interval, text_of, symbols):
    """Three steps in a row that follow from none end a run's caching, two don't."""
    unet, scheduler = make_small_unet(), ddim(12)
    handle = apply_agentsd(unet, recipe=Recipe(steps=StepCache(interval)))
    with warned("encoder_hidden_states changed"):
        made = loop(unet, scheduler, text_of=text_of)
    assert letters(handle) == symbols
    assert "f" in symbols or equal(made, loop(make_small_unet(), scheduler, text_of=text_of))


def test_crops_that_share_a_step_and_a_text_are_computed():
    handle, scheduler = apply_agentsd(unet := make_small_unet(), recipe=CACHED), ddim(10)
    latents, text = inputs()
    with warned("the U-Net is called more than once in a step on the same text"), torch.no_grad():
        for t in scheduler.timesteps:
            for crop in (latents, latents.roll(4, -1)):
                unet(crop, t, text)
    assert letters(handle) == "F" * 20


def test_under_gradients_a_call_is_whole():
    unet, baseline, caller = make_unet(), make_unet(), Guided()
    handle = apply_agentsd(unet, recipe=CACHED)
    with warned("gradients are on"):
        for model in (unet, baseline):
            caller(model, 0)
            for i in range(1, 3):
                out = model(caller.latents[i], caller.timesteps[i], caller.text).sample
                out.square().mean().backward()
    for ours, theirs in zip(unet.parameters(), baseline.parameters(), strict=True):
        assert (ours.grad is None and theirs.grad is None) or torch.equal(ours.grad, theirs.grad)
    assert letters(handle) == "FFF"
    assert not kept(handle)


def test_runs_that_take_turns_in_a_thread_are_runs_of_their_own():
    """As in an async server: each call is as in a run alone, and nothing is said."""
    unet, schedulers, twins = make_unet(), (ddim(10), ddim(12)), (make_unet(), make_unet())
    host = Host(unet, schedulers[0])
    host.another = schedulers[1]
    handle = apply_agentsd(host, recipe=STEP_CACHING)
    hosts = list(map(Host, twins, schedulers))
    alone = [apply_agentsd(each, recipe=STEP_CACHING) for each in hosts]
    with silent(), torch.no_grad():
        for steps in zip(*(one.timesteps for one in schedulers), strict=False):
            summaries = []
            for t, twin, seed in zip(steps, twins, (0, 1), strict=True):
                latents, text = inputs(seed)[0], TEXTS[seed]
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
                image, own = draw(run, **RUN), run is patched
                assert torch.equal(made.setdefault((name, own), image), image)
                assert ("corrected" in handle.summary()) == own


def test_a_strided_loop_is_planned_by_its_own_stride():
    unet, twin, scheduler = make_unet(), make_unet(), ddim(40)
    handle = apply_agentsd(host := Host(unet, scheduler), recipe=CACHED)
    with warned("skip some of the scheduler's list"):
        loop(host.unet, scheduler, scheduler.timesteps[::3])
    assert letters(handle).startswith("FFfFfF")
    assert "corrected" not in handle.summary()
    caller, calls = Caller(steps=20), (0, 3, 4, 9, 11, 18)
    # whatever the jump, what follows it is computed
    assert equal(outputs(unet, caller, calls=calls), outputs(twin, caller, calls=calls))


ORDERS = {
    "reversed": lambda t: t.flip(0),
    "mixed": lambda t: t[[0, 9, 1, 8, 2, 7, 3, 6]],
    "from the middle, then the start": lambda t: [*t[5:].tolist(), *t[:5].tolist()],
}


@pytest.mark.parametrize("order", ORDERS)
def test_a_list_that_is_walked_in_another_order_is_whole(order):
    unet, scheduler = make_unet(), ddim(10)
    handle = apply_agentsd(unet, recipe=STEP_CACHING)
    asked = ORDERS[order](scheduler.timesteps)
    with warned("the run's steps are not known" if "middle" in order else "the timesteps go up"):
        made = loop(unet, scheduler, asked)
    assert equal(made, loop(make_unet(), scheduler, asked))
    assert set(letters(handle)) == {"F"}


def test_a_timestep_off_the_list_is_told_and_computed():
    latents, text = inputs()
    handle = apply_agentsd(host := Host(unet := make_unet(), ddim(10)), recipe=CACHED)
    with torch.no_grad():
        for t in (900, 800):
            unet(latents, t, text)
        with warned("is not one of the scheduler's list, so its call computes"):
            unet(latents, 777, text)
        unet(latents, 700, text)
    assert letters(handle) == "FfFF"
    del host


def test_rounded_timesteps_that_repeat_are_steps_of_their_own():
    """Each is planned, and corrected, by its own noise level."""
    scheduler = diffusers.UniPCMultistepScheduler(**BETAS, use_karras_sigmas=True)
    scheduler.set_timesteps(steps := 45)
    assert len(set(scheduler.timesteps.tolist())) < steps
    host = Host(make_small_unet(), scheduler)
    handle = apply_agentsd(host, recipe=STEP_CACHING)
    with silent():
        loop(host.unet, scheduler)
    symbols = "".join("fF"[computed] for computed in STEP_CACHING.steps.full_steps(steps))
    assert letters(handle) == symbols
    assert f"{symbols.rstrip('f').count('f')} corrected" in handle.summary()
