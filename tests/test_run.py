"""Where in its run a call is."""

import math

import diffusers
import pytest
import torch

from agentsd.run import TRAINING_TIMESTEPS, RunReader, early_threshold, list_of

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


def walk(scheduler, reader=None, start=0):
    """Read each of a scheduler's timesteps in the pipeline's order."""
    reader = reader or RunReader(0.4)
    return [reader.read(t, list_of(scheduler)) for t in scheduler.timesteps[start:]]


@pytest.mark.parametrize(("kind", "options"), SCHEDULERS)
@pytest.mark.parametrize("steps", [4, 20, 50])
def test_early_steps_are_the_first_share_of_the_distinct_timesteps(kind, options, steps):
    scheduler = kind(**BETAS, **options)
    scheduler.set_timesteps(steps)
    distinct = sorted(set(scheduler.timesteps.tolist()), reverse=True)
    expected = set(distinct[: round(0.4 * len(distinct))])
    early = [step.early for step in walk(scheduler)]
    assert early == [t in expected for t in scheduler.timesteps.tolist()]
    assert early == sorted(early, reverse=True)  # a run changes its phase once


def test_the_papers_run_has_20_early_steps_of_50():
    scheduler = diffusers.PNDMScheduler(**BETAS, skip_prk_steps=True, steps_offset=1)
    scheduler.set_timesteps(50)
    assert len(scheduler.timesteps) == 51  # PLMS repeats its second timestep
    assert len({s.timestep for s in walk(scheduler) if s.early}) == 20


@pytest.mark.parametrize(("early_frac", "count"), [(0.0, 0), (0.5, 5), (0.96, 10), (1.0, 10)])
def test_threshold(early_frac, count):
    timesteps = list(range(90, -1, -10))
    assert sum(t > early_threshold(timesteps, early_frac) for t in timesteps) == count


def test_a_bare_unet_is_scheduled_by_its_training_timesteps():
    reader = RunReader(0.4)
    assert [reader.read(t, None).early for t in (999, 600, 599, 0)] == [True, True, False, False]
    assert not reader.read(0, None).has_no_early_step
    assert reader.read(torch.tensor([999, 3]), None).early  # of a batch the noisiest counts


def test_runs_are_told_apart():
    scheduler = diffusers.DDIMScheduler(**BETAS)
    scheduler.set_timesteps(10)
    reader = RunReader(0.4)
    assert not any(s.has_no_early_step for s in walk(scheduler, reader))
    assert not any(s.has_no_early_step for s in walk(scheduler, reader)[:2])  # the run breaks off here
    late = walk(scheduler, reader, start=5)  # img2img that starts late
    assert [s.has_no_early_step for s in late] == [True] + [False] * 4
    assert not any(s.has_no_early_step for s in walk(scheduler, reader, start=2))
    scheduler.set_timesteps(20)
    assert sum(s.early for s in walk(scheduler, reader)) == 8


class Fickle:
    """A scheduler that makes its list anew at each look."""

    @property
    def timesteps(self):
        return torch.arange(900, -1, -100)


@pytest.mark.parametrize("read", [lambda t: t, float, lambda t: t.clone(), lambda t: t.expand(2)])
def test_a_scheduler_that_makes_its_list_anew_at_each_look_opens_no_new_runs(read):
    reader, scheduler = RunReader(0.4), Fickle()
    steps = [reader.read(read(t), list_of(scheduler)) for t in scheduler.timesteps]
    assert [s.early for s in steps] == [True] * 4 + [False] * 6
    assert [s.first_call for s in steps] == [True] + [False] * 9
    assert not any(s.has_no_early_step for s in steps)


@pytest.mark.parametrize(("kind", "options"), SCHEDULERS)
def test_an_element_leads_to_its_own_list_whatever_scheduler_is_named(kind, options):
    scheduler, other = kind(**BETAS, **options), diffusers.DDIMScheduler(**BETAS)
    scheduler.set_timesteps(10)
    other.set_timesteps(7)
    known = walk(scheduler)
    for named in (None, other):
        reader = RunReader(0.4)
        assert [reader.read(t, list_of(named)) for t in scheduler.timesteps] == known
        reader = RunReader(0.4)
        assert [reader.read(t.expand(4), list_of(named)) for t in scheduler.timesteps] == known


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
        reader = RunReader(0.4)
        assert [reader.read(copied(t), list_of(scheduler)) for t in scheduler.timesteps] == known
    assert [s.first_call for s in known] == [True] + [False] * (len(known) - 1)
    assert [s.off_list for s in known] == [False] * len(known)


def test_repeats_are_told():
    scheduler = diffusers.PNDMScheduler(**BETAS, skip_prk_steps=True, steps_offset=1)
    scheduler.set_timesteps(5)
    assert [s.repeated_timestep for s in walk(scheduler)] == [False, False, True, False, False, False]


def test_a_list_that_is_changed_in_place_is_read_again():
    scheduler = diffusers.DDIMScheduler(**BETAS)
    scheduler.set_timesteps(10)
    reader = RunReader(0.4)
    assert sum(s.early for s in walk(scheduler, reader)) == 4
    scheduler.timesteps.copy_(torch.arange(90, -1, -10))
    assert [s.timestep for s in walk(scheduler, reader)] == list(range(90, -1, -10))
    assert sum(s.early for s in walk(scheduler, reader)) == 4


def test_a_timestep_that_is_on_no_list_is_told():
    scheduler = diffusers.DDIMScheduler(**BETAS)
    scheduler.set_timesteps(10)
    reader = RunReader(0.4)
    assert [(s.off_list, s.early) for s in (reader.read(t, list_of(scheduler)) for t in (555, 455))] == [
        (True, True),  # 600 is the last that is early
        (True, False),
    ]
    assert not reader.read(500, list_of(scheduler)).off_list
    assert not any(RunReader(0.4).read(t).off_list for t in (0, 3, 999))
    assert early_threshold(TRAINING_TIMESTEPS, 0.4) == 599
    assert math.isinf(early_threshold(TRAINING_TIMESTEPS, 0.0))
