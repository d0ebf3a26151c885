"""Where in its run a call is, and which run it is of, also where timesteps do not fall."""

import math

import diffusers
import pytest
import torch
from logs import silent, warned
from recipes import AGENTS_THEN_KEYS
from tiny import BETAS, call, watch_phases

from agentsd import Agents, ByDistance, Phases, PooledAgents, Recipe, apply_agentsd
from agentsd.run import TRAINING_TIMESTEPS, Run, early_threshold, list_of

SCHEDULERS = [
    (diffusers.PNDMScheduler, {"skip_prk_steps": True, "steps_offset": 1}),
    (diffusers.PNDMScheduler, {}),
    (diffusers.EulerDiscreteScheduler, {}),
    (diffusers.DPMSolverMultistepScheduler, {"use_karras_sigmas": True}),
    (diffusers.HeunDiscreteScheduler, {}),
    (diffusers.LCMScheduler, {}),
]


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


@pytest.mark.parametrize(("kind", "options"), SCHEDULERS)
@pytest.mark.parametrize("steps", [4, 50])
def test_early_steps_are_the_first_share_of_the_distinct_timesteps(kind, options, steps):
    scheduler = kind(**BETAS, **options)
    scheduler.set_timesteps(steps)
    distinct = sorted(set(scheduler.timesteps.tolist()), reverse=True)
    expected = set(distinct[: round(0.4 * len(distinct))])
    early = [step.stage == 0 for step in walk(scheduler)]
    assert early == [t in expected for t in scheduler.timesteps.tolist()]
    assert early == sorted(early, reverse=True)  # a run changes its phase once


def test_the_papers_run_has_20_early_steps_of_50_and_repeats_its_second():
    scheduler = diffusers.PNDMScheduler(**BETAS, skip_prk_steps=True, steps_offset=1)
    scheduler.set_timesteps(50)
    steps = walk(scheduler)
    assert len(steps) == 51
    assert len({s.timestep for s in steps if s.stage == 0}) == 20
    assert [s.repeats for s in steps] == [False, False, True] + [False] * 48


def test_a_bare_unet_is_scheduled_by_its_training_timesteps():
    run = new_run()
    assert [run.place(None, t, None).stage == 0 for t in (999, 600, 599, 0)] == [True, True, False, False]
    assert not run.is_late
    assert run.place(None, torch.tensor([999, 3]), None).stage == 0  # of a batch the noisiest counts


def test_runs_are_told_apart():
    scheduler = diffusers.DDIMScheduler(**BETAS)
    scheduler.set_timesteps(10)
    run = new_run()
    assert not any(late(scheduler, run))
    assert not any(late(scheduler, run)[:2])  # the run breaks off here
    assert late(scheduler, run, start=5) == [True] + [False] * 4  # img2img that starts late
    assert not any(late(scheduler, run, start=2))
    scheduler.set_timesteps(20)
    assert sum(s.stage == 0 for s in walk(scheduler, run)) == 8


COPIES = [float, torch.Tensor.clone, lambda t: t.float()[None], lambda t: torch.full((3,), float(t))]


@pytest.mark.parametrize(("kind", "options"), SCHEDULERS)
def test_an_element_leads_to_its_own_list_and_a_copy_to_the_schedulers(kind, options):
    scheduler, other = kind(**BETAS, **options), diffusers.DDIMScheduler(**BETAS)
    scheduler.set_timesteps(10)
    other.set_timesteps(7)
    known = walk(scheduler)
    for named, read in [
        *((named, read) for named in (None, other) for read in (lambda t: t, lambda t: t.expand(4))),
        *((scheduler, read) for read in COPIES),
    ]:
        run = new_run()
        assert [run.place(None, read(t), list_of(named)) for t in scheduler.timesteps] == known
    assert [s.begins for s in known] == [True] + [False] * (len(known) - 1)
    assert not any(s.off_list for s in known)


def test_a_timestep_that_is_on_no_list_is_told():
    scheduler = diffusers.DDIMScheduler(**BETAS)
    scheduler.set_timesteps(10)
    run = new_run()
    steps = [run.place(None, t, list_of(scheduler)) for t in (555, 455)]
    assert [(s.off_list, s.stage) for s in steps] == [(True, 0), (True, 1)]  # 600 is the last that is early
    assert not run.place(None, 500, list_of(scheduler)).off_list
    assert not any(new_run().place(None, t).off_list for t in (0, 3, 999))
    assert early_threshold(TRAINING_TIMESTEPS, 0.4) == 599
    assert math.isinf(early_threshold(TRAINING_TIMESTEPS, 0.0))


CONTINUOUS = {"timestep_type": "continuous", "use_karras_sigmas": True, "prediction_type": "v_prediction"}


def test_a_pipeline_that_shares_the_unet_is_followed_by_its_own_scheduler(make_pipeline, sample):
    pipe = make_pipeline(scheduler=diffusers.DDIMScheduler(**BETAS))
    other = diffusers.AutoPipelineForText2Image.from_pipe(pipe)
    other.scheduler = diffusers.EulerDiscreteScheduler(**BETAS, **CONTINUOUS)
    assert other.unet is pipe.unet
    phases = watch_phases(apply_agentsd(pipe, recipe=AGENTS_THEN_KEYS))
    seen = phases[next(iter(phases))]
    sample(pipe, num_inference_steps=10)
    assert seen == ["agent"] * 4 + ["downsample"] * 6
    seen.clear()
    sample(other, num_inference_steps=5)
    assert seen == ["agent"] * 2 + ["downsample"] * 3


def test_a_timestep_off_every_list_is_told_once(pipe):
    apply_agentsd(pipe, recipe=AGENTS_THEN_KEYS)
    pipe.scheduler.set_timesteps(5)
    with warned("agentsd: timestep 555 is not one of the scheduler's"):
        call(pipe.unet, 555)
    with silent():
        call(pipe.unet, 555)


SHORT = Recipe(ByDistance((PooledAgents(4), None), (1000.0,)))
"""Agents in the first call alone, and in the first after a run is taken for a new one."""


RISING = [
    (diffusers.DDIMInverseScheduler, {}),
    (diffusers.KDPM2AncestralDiscreteScheduler, {"use_karras_sigmas": True}),
]


@pytest.mark.filterwarnings("ignore:__array_wrap__:DeprecationWarning")
@pytest.mark.parametrize(("kind", "options"), RISING)
def test_a_timestep_that_rises_opens_no_new_run(make_pipeline, sample, kind, options):
    """Nor is a false word said of a missing early step."""
    pipe = make_pipeline(scheduler=kind(**BETAS, **options))
    steps = []
    pipe.unet.register_forward_pre_hook(lambda module, args: steps.append(float(args[1])))
    phases = watch_phases(apply_agentsd(pipe, recipe=AGENTS_THEN_KEYS))
    for _ in range(2):
        assert sample(pipe, num_inference_steps=10).isfinite().all()  # a warning is an error here
    assert steps != sorted(steps, reverse=True)
    distinct = sorted(set(pipe.scheduler.timesteps.tolist()), reverse=True)
    early = set(distinct[: round(0.4 * len(distinct))])
    for seen in phases.values():
        assert seen == ["agent" if t in early else "downsample" for t in steps]
    phases = watch_phases(apply_agentsd(pipe, recipe=SHORT))
    for _ in range(2):  # the next run is a new one
        sample(pipe, num_inference_steps=10)
    for seen in phases.values():
        assert seen == 2 * (["agent"] + ["baseline"] * (len(seen) // 2 - 1))
