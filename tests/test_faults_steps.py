"""Faults that were found and mended, each a test that the old code fails.

Step caching: whose run a call is of, and which step of it.
"""

import threading

import diffusers
import pytest
import torch
from callers import RUN, Caller, Host, inputs
from logs import silent, warned
from recipes import STEP_CACHING
from tiny import BETAS, make_small_unet, make_unet, may_skip

from agentsd import Recipe, StepCache, apply_agentsd, remove_agentsd

STEPS = Recipe(steps=StepCache(2))


def loop(unet, scheduler, timesteps, text=None, hook=lambda i, text: text):
    """A loop by hand: the U-Net's outputs."""
    latents, own = inputs()
    text = own if text is None else text
    outs = []
    with torch.no_grad():
        for i, t in enumerate(timesteps):
            outs.append(unet(scheduler.scale_model_input(latents, t), t, hook(i, text)).sample)
            latents = scheduler.step(outs[-1], t, latents).prev_sample
    return outs


def ddim(steps=None):
    scheduler = diffusers.DDIMScheduler(**BETAS, clip_sample=False)
    if steps is not None:
        scheduler.set_timesteps(steps)
    return scheduler


def same(outs, others):
    return all(torch.equal(a, b) for a, b in zip(outs, others, strict=True))


# D13: the scheduler is the run's


def test_corrections_are_by_the_schedulers_of_the_pipeline_that_is_patched(make_pipeline):
    pipe = make_pipeline(scheduler=ddim())
    other = diffusers.StableDiffusionPipeline.from_pipe(pipe)
    other.scheduler = diffusers.PNDMScheduler(**BETAS, skip_prk_steps=True)
    third = diffusers.StableDiffusionPipeline.from_pipe(pipe)
    third.scheduler = diffusers.DDIMScheduler(**BETAS, clip_sample=False, prediction_type="v_prediction")
    made = {}
    for patched in (pipe, other, third):
        handle = apply_agentsd(patched, recipe=STEPS)
        with warned("not those of a scheduler that is known"):
            for name, run in {"eps": pipe, "PLMS": other, "v": third}.items():
                image = run("a cat", generator=torch.manual_seed(0), output_type="latent", **RUN).images
                own = run is patched
                assert torch.equal(made.setdefault((name, own), image), image)
                assert ("corrected" in handle.summary()) == own
    remove_agentsd(pipe)


# D14: calls that jump over the list


@pytest.mark.parametrize("every", [2, 3])
def test_a_strided_loop_is_planned_by_its_own_stride(every):
    unet, twin = make_unet(), make_unet()
    handle = apply_agentsd(unet, recipe=STEPS)
    scheduler = ddim(40)
    with warned("skip some of the scheduler's list"):
        loop(unet, scheduler, scheduler.timesteps[::every])
    calls = handle.summary().split()[0]
    assert calls.startswith("FFfFfF")
    assert "corrected" not in handle.summary()
    caller = Caller(steps=20)
    for i in (0, 3, 4, 9, 11, 18):  # whatever the jump, what follows it is computed
        assert torch.equal(caller(unet, i), caller(twin, i))


def test_a_loop_of_ints_on_a_scheduler_that_was_never_set(make_pipeline):
    pipe = make_pipeline(scheduler=ddim())
    own = ddim(20)
    baseline = loop(make_unet(), own, [int(t) for t in own.timesteps])
    handle = apply_agentsd(pipe, recipe=STEPS)
    with warned("skip some of the scheduler's list"):
        made = loop(pipe.unet, own, [int(t) for t in own.timesteps])
    assert handle.summary().startswith("FFfFfFfF")  # 50 places of the 1,000 at a time, from the second on
    assert same(made[:2], baseline[:2])
    irregular = [t for t in (999, 900, 820, 650, 610, 333, 300, 120, 11)]
    handle = apply_agentsd(pipe, recipe=STEPS)
    made = loop(pipe.unet, own, irregular)
    assert same(made, loop(make_unet(), own, irregular))
    assert handle.summary().startswith("F" * 9)


ORDERS = {
    "reversed": lambda t: t.flip(0),
    "mixed": lambda t: t[[0, 9, 1, 8, 2, 7, 3, 6]],
    "from the middle, then the start": lambda t: [*t[5:].tolist(), *t[:5].tolist()],
}


@pytest.mark.parametrize("order", ORDERS)
def test_a_list_that_is_walked_in_another_order(order):
    unet, scheduler = make_unet(), ddim(10)
    apply_agentsd(unet, recipe=STEP_CACHING)
    asked = ORDERS[order](scheduler.timesteps)
    made = loop(unet, scheduler, asked)
    baseline = loop(make_unet(), scheduler, asked)
    # A list of its own is a run of its own, in whatever order: its first three steps are computed.
    # Numbers that are on no known list stay whole.
    assert same(made[:3], baseline[:3])
    assert order != "from the middle, then the start" or same(made, baseline)


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


def test_a_timestep_off_the_list_is_told_and_computed():
    unet, scheduler, (latents, text) = make_unet(), ddim(10), inputs()
    handle = apply_agentsd(unet, recipe=STEPS)
    with torch.no_grad():
        for t in scheduler.timesteps[:3]:
            unet(latents, t, text)
        pipe = type("Pipe", (), {"unet": unet, "scheduler": scheduler})()
        handle = apply_agentsd(pipe, recipe=STEPS)
        for t in (900, 800):
            unet(latents, t, text)
        with warned("is not one of the scheduler's list, so its call computes"):
            unet(latents, 777, text)
        unet(latents, 700, text)
    assert handle.summary().startswith("FfFF")


# D15: two prompts by turns


def test_prompts_by_turns_are_computed():
    unet, twin, scheduler = make_unet(), make_unet(), ddim(12)
    texts = [inputs(seed)[1] for seed in (0, 1)]
    handle = apply_agentsd(unet, recipe=STEP_CACHING)
    turns = {"hook": lambda i, text: texts[i % 2]}
    with warned("the U-Net gets another text"):
        made = loop(unet, scheduler, scheduler.timesteps, **turns)
    assert handle.summary().startswith("F" * 12)
    scheduler.set_timesteps(12)
    assert same(made, loop(twin, scheduler, scheduler.timesteps, **turns))


# D19: one list for two images


@pytest.mark.parametrize("way_out", ["set_timesteps", "reset"])
def test_two_images_on_one_list_are_told_apart_if_the_caller_says_so(way_out):
    unet, scheduler, (latents, text) = make_unet(), ddim(12), inputs()
    handle = apply_agentsd(unet, recipe=STEPS)
    with torch.no_grad():
        for t in scheduler.timesteps[:6]:
            unet(latents, t, text)
        if way_out == "reset":
            handle.reset()
        else:
            scheduler.set_timesteps(12)
        t, other = scheduler.timesteps[6], inputs(3)[0]
        assert torch.equal(unet(other, t, text).sample, make_unet()(other, t, text).sample)


# D24: under torch.compile the corrections run compiled too


@pytest.mark.parametrize("way", ["pipe.unet, then apply", "apply, then pipe.unet", "in place", "blocks"])
def test_a_compiled_unets_corrections_run_compiled(make_pipeline, sample, way):
    torch.compiler.reset()
    ran, eager = [], []

    def backend(graph, inputs):
        return lambda *args: (ran.append(1), graph(*args))[1]

    pipe = make_pipeline(unet=make_small_unet(), scheduler=ddim())
    unet = pipe.unet
    if way == "apply, then pipe.unet":
        handle = apply_agentsd(pipe, recipe=STEPS)
    if way in ("pipe.unet, then apply", "apply, then pipe.unet"):
        pipe.unet = torch.compile(unet, backend=backend, fullgraph=True)
    elif way == "in place":
        unet.compile(backend=backend, fullgraph=True)
    else:
        unet.compile_repeated_blocks(backend=backend, fullgraph=True)
    if way != "apply, then pipe.unet":
        handle = apply_agentsd(pipe, recipe=STEPS)
    if way == "blocks":  # which lie inside of what cached steps leave out
        unet.conv_in.register_forward_hook(may_skip(lambda *_: eager.append(1)))
    sample(pipe, **RUN)
    torch.compiler.reset()
    assert "4 corrected" in handle.summary()
    if way == "blocks":
        assert len(eager) == 14
    else:
        assert len(ran) == 14  # ten calls, and four once more


# D26: what is told is told of the thread's own run


def test_a_summary_is_of_one_run():
    unet, scheduler = make_unet(), ddim(10)
    handle = apply_agentsd(unet, recipe=STEPS)
    (latents, text), told = inputs(), []
    order, turns = [threading.Event() for _ in range(2)], 10

    def run(own):
        mine = ddim(10)
        with torch.no_grad():
            for t in mine.timesteps:
                order[own].wait()
                order[own].clear()
                unet(latents, t, text)
                order[1 - own].set()
        told.append(handle.summary())

    order[0].set()
    threads = [threading.Thread(target=run, args=(own,)) for own in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(summary.startswith("FfFfFfFfFf  (10 calls") for summary in told)
    assert handle.summary() in told  # this thread made no call: the last run of any
    assert turns == len(scheduler.timesteps)
