"""Where in its run a call is."""

import math

import diffusers
import pytest
import torch

from agentsd import Agents, Phases
from agentsd.run import TRAINING_TIMESTEPS, Run, early_threshold, list_of

BETAS = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
SCHEDULERS = [
    (diffusers.PNDMScheduler, {"skip_prk_steps": True, "steps_offset": 1}),
    (diffusers.PNDMScheduler, {}),
    (diffusers.DDIMScheduler, {}),
    (diffusers.EulerDiscreteScheduler, {}),
    (diffusers.EulerAncestralDiscreteScheduler, {}),
    (diffusers.DPMSolverMultistepScheduler, {}),
    (diffusers.DPMSolverMultistepScheduler, {"use_karras_sigmas": True}),
    (diffusers.HeunDiscreteScheduler, {}),
    (diffusers.UniPCMultistepScheduler, {}),
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
@pytest.mark.parametrize("steps", [4, 20, 50])
def test_early_steps_are_the_first_share_of_the_distinct_timesteps(kind, options, steps):
    scheduler = kind(**BETAS, **options)
    scheduler.set_timesteps(steps)
    distinct = sorted(set(scheduler.timesteps.tolist()), reverse=True)
    expected = set(distinct[: round(0.4 * len(distinct))])
    early = [step.stage == 0 for step in walk(scheduler)]
    assert early == [t in expected for t in scheduler.timesteps.tolist()]
    assert early == sorted(early, reverse=True)  # a run changes its phase once


def test_the_papers_run_has_20_early_steps_of_50():
    scheduler = diffusers.PNDMScheduler(**BETAS, skip_prk_steps=True, steps_offset=1)
    scheduler.set_timesteps(50)
    assert len(scheduler.timesteps) == 51  # PLMS repeats its second timestep
    assert len({s.timestep for s in walk(scheduler) if s.stage == 0}) == 20


@pytest.mark.parametrize(("early_frac", "count"), [(0.0, 0), (0.5, 5), (0.96, 10), (1.0, 10)])
def test_threshold(early_frac, count):
    timesteps = list(range(90, -1, -10))
    assert sum(t > early_threshold(timesteps, early_frac) for t in timesteps) == count


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


class Fickle:
    """A scheduler that makes its list anew at each look."""

    @property
    def timesteps(self):
        return torch.arange(900, -1, -100)


@pytest.mark.parametrize("read", [lambda t: t, float, lambda t: t.clone(), lambda t: t.expand(2)])
def test_a_scheduler_that_makes_its_list_anew_at_each_look_opens_no_new_runs(read):
    run, scheduler = new_run(), Fickle()
    steps = [run.place(None, read(t), list_of(scheduler)) for t in scheduler.timesteps]
    assert [s.stage == 0 for s in steps] == [True] * 4 + [False] * 6
    assert [s.begins for s in steps] == [True] + [False] * 9


@pytest.mark.parametrize(("kind", "options"), SCHEDULERS)
def test_an_element_leads_to_its_own_list_whatever_scheduler_is_named(kind, options):
    scheduler, other = kind(**BETAS, **options), diffusers.DDIMScheduler(**BETAS)
    scheduler.set_timesteps(10)
    other.set_timesteps(7)
    known = walk(scheduler)
    for named in (None, other):
        run = new_run()
        assert [run.place(None, t, list_of(named)) for t in scheduler.timesteps] == known
        run = new_run()
        assert [run.place(None, t.expand(4), list_of(named)) for t in scheduler.timesteps] == known


@pytest.mark.parametrize(("kind", "options"), SCHEDULERS)
def test_a_copy_of_an_element_is_found_on_the_schedulers_list(kind, options):
    scheduler = kind(**BETAS, **options)
    scheduler.set_timesteps(10)
    known = walk(scheduler)
    for copied in (
        float,
        torch.Tensor.clone,
        lambda t: t.float()[None],
        lambda t: torch.full((3,), float(t)),
    ):
        run = new_run()
        assert [run.place(None, copied(t), list_of(scheduler)) for t in scheduler.timesteps] == known
    assert [s.begins for s in known] == [True] + [False] * (len(known) - 1)
    assert [s.off_list for s in known] == [False] * len(known)


def test_repeats_are_told():
    scheduler = diffusers.PNDMScheduler(**BETAS, skip_prk_steps=True, steps_offset=1)
    scheduler.set_timesteps(5)
    assert [s.repeats for s in walk(scheduler)] == [False, False, True, False, False, False]


def test_a_list_that_is_changed_in_place_is_read_again():
    scheduler = diffusers.DDIMScheduler(**BETAS)
    scheduler.set_timesteps(10)
    run = new_run()
    assert sum(s.stage == 0 for s in walk(scheduler, run)) == 4
    scheduler.timesteps.copy_(torch.arange(90, -1, -10))
    assert [s.timestep for s in walk(scheduler, run)] == list(range(90, -1, -10))
    assert sum(s.stage == 0 for s in walk(scheduler, run)) == 4


def test_a_timestep_that_is_on_no_list_is_told():
    scheduler = diffusers.DDIMScheduler(**BETAS)
    scheduler.set_timesteps(10)
    run = new_run()
    assert [
        (s.off_list, s.stage == 0) for s in (run.place(None, t, list_of(scheduler)) for t in (555, 455))
    ] == [
        (True, True),  # 600 is the last that is early
        (True, False),
    ]
    assert not run.place(None, 500, list_of(scheduler)).off_list
    assert not any(new_run().place(None, t).off_list for t in (0, 3, 999))
    assert early_threshold(TRAINING_TIMESTEPS, 0.4) == 599
    assert math.isinf(early_threshold(TRAINING_TIMESTEPS, 0.0))
