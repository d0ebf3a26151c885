"""Where in its run a call is, and which run it is of, also where timesteps do not fall."""

import math

import diffusers
import pytest
import torch
from callers import ddim
from logs import silent, warned
from recipes import AGENTS_THEN_KEYS
from sampling import SAMPLERS
from tiny import BETAS, INPUT_IMAGE, call, watch_phases

from agentsd import Agents, ByDistance, Phases, PooledAgents, Recipe, apply_agentsd
from agentsd.run import TRAINING_TIMESTEPS, Run, early_threshold, list_of

EACH_SAMPLER = ["PLMS", "PNDM", "Euler", "DPM++ 2M, Karras", "Heun", "LCM"]


def new_run():
    """A run whose first 40% of steps are its stage 0."""
    return Run(Phases(Agents(), None, 0.4))


def walk(scheduler, run=None, start=0):
    """Place each of a scheduler's timesteps in the pipeline's order."""
    run = run or new_run()
    return [run.place(None, t, list_of(scheduler)) for t in scheduler.timesteps[start:]]


def late(scheduler, run, start=0):
    """Whether each call begins a run that has no early step."""
    calls = ((run.place(None, t, list_of(scheduler)), run.is_late) for t in scheduler.timesteps[start:])
    return [call.begins and is_late for call, is_late in calls]


def first_share(scheduler):
    distinct = sorted(set(scheduler.timesteps.tolist()), reverse=True)
    return set(distinct[: round(0.4 * len(distinct))])


@pytest.mark.parametrize("name", EACH_SAMPLER)
def test_early_steps_are_the_first_share_of_the_distinct_timesteps(name):
    scheduler = SAMPLERS[name].make()
    for steps in (4, 50):
        scheduler.set_timesteps(steps)
        early = [step.stage == 0 for step in walk(scheduler)]
        assert early == [t in first_share(scheduler) for t in scheduler.timesteps.tolist()]
        assert early == sorted(early, reverse=True)  # a run changes its phase once


def test_the_papers_run_has_20_early_steps_of_50_and_repeats_its_second():
    scheduler = diffusers.PNDMScheduler(**BETAS, skip_prk_steps=True, steps_offset=1)
    scheduler.set_timesteps(50)
    steps = walk(scheduler)
    assert len({s.timestep for s in steps if s.stage == 0}) == 20
    assert [s.repeats for s in steps] == [False, False, True] + [False] * 48


def test_a_bare_unet_is_scheduled_by_its_training_timesteps():
    run = new_run()
    assert [run.place(None, t, None).stage == 0 for t in (999, 600, 599, 0)] == [True, True, False, False]
    assert not run.is_late
    assert run.place(None, torch.tensor([999, 3]), None).stage == 0  # of a batch the noisiest counts
    assert early_threshold(TRAINING_TIMESTEPS, 0.4) == 599
    assert math.isinf(early_threshold(TRAINING_TIMESTEPS, 0.0))


def test_runs_are_told_apart():
    scheduler, run = ddim(10), new_run()
    assert not any(late(scheduler, run))
    assert not any(late(scheduler, run)[:2])  # the run breaks off here
    assert late(scheduler, run, start=5) == [True] + [False] * 4  # img2img that starts late
    assert not any(late(scheduler, run, start=2))
    scheduler.set_timesteps(20)
    assert sum(s.stage == 0 for s in walk(scheduler, run)) == 8


COPIES = [float, torch.Tensor.clone, lambda t: t.float()[None], lambda t: torch.full((3,), float(t))]


@pytest.mark.parametrize("name", EACH_SAMPLER)
def test_an_element_leads_to_its_own_list_and_a_copy_to_the_schedulers(name):
    scheduler, other = SAMPLERS[name].make(), ddim(7)
    scheduler.set_timesteps(10)
    known = walk(scheduler)
    for named, read in [
        *((named, read) for named in (None, other) for read in (lambda t: t, lambda t: t.expand(4))),
        *((scheduler, read) for read in COPIES),
    ]:
        run = new_run()
        assert [run.place(None, read(t), list_of(named)) for t in scheduler.timesteps] == known
    assert [s.begins for s in known] == [True] + [False] * (len(known) - 1)
    assert not any(s.off_list for s in known)


def test_a_timestep_that_is_on_no_list_is_told_once(pipe):
    scheduler, run = ddim(10), new_run()
    steps = [run.place(None, t, list_of(scheduler)) for t in (555, 455)]
    assert [(s.off_list, s.stage) for s in steps] == [(True, 0), (True, 1)]  # 600 is the last that is early
    assert not run.place(None, 500, list_of(scheduler)).off_list
    assert not any(new_run().place(None, t).off_list for t in (0, 3, 999))
    pipe.scheduler = scheduler
    apply_agentsd(pipe, recipe=AGENTS_THEN_KEYS)
    with warned("agentsd: timestep 555 is not one of the scheduler's"):
        call(pipe.unet, 555)
    with silent():
        call(pipe.unet, 555)


def test_a_run_without_an_early_step_is_said_once(make_pipeline):
    pipe = make_pipeline(cls=diffusers.StableDiffusionImg2ImgPipeline)
    apply_agentsd(pipe, recipe=AGENTS_THEN_KEYS)
    more = {"image": INPUT_IMAGE, "num_inference_steps": 10, "output_type": "latent"}
    with warned("no early step") as said:
        for strength in (0.5, 0.5, 1.0):
            pipe("a cat", strength=strength, **more)
    assert len(said) == 1


SHORT = Recipe(ByDistance((PooledAgents(4), None), (1000.0,)))
"""Agents in the first call alone, and in the first after a run is taken for a new one."""


@pytest.mark.filterwarnings("ignore:__array_wrap__:DeprecationWarning")
@pytest.mark.parametrize(
    ("name", "more"),
    [("Heun", {}), ("Euler a", {}), ("DDIM inversion", {}), ("KDPM2 a", {"use_karras_sigmas": True})],
)
def test_phases_in_a_run_of_each_scheduler(pipe, sample, name, more):
    """A timestep that rises opens no new run; nor is a false word said of a missing early step.

    All of an inversion's rise, and some of KDPM2's. The scheduler is swapped after the patch; the early calls
    are counted from what the layers do.
    """
    steps = []
    pipe.unet.register_forward_pre_hook(lambda module, args: steps.append(float(args[1])))
    phases = watch_phases(apply_agentsd(pipe, recipe=AGENTS_THEN_KEYS))
    pipe.scheduler = SAMPLERS[name].make(**more)
    for _ in range(2):
        assert sample(pipe, num_inference_steps=10).isfinite().all()  # a warning is an error here
    for seen in phases.values():
        assert seen == ["agent" if t in first_share(pipe.scheduler) else "downsample" for t in steps]
    phases = watch_phases(apply_agentsd(pipe, recipe=SHORT))
    for _ in range(2):  # the next run is a new one
        sample(pipe, num_inference_steps=10)
    for seen in phases.values():
        assert seen == 2 * (["agent"] + ["baseline"] * (len(seen) // 2 - 1))
