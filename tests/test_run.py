import diffusers
import pytest
import torch

from agentsd.schedule import StepReader, early_threshold

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
    reader = reader or StepReader(0.4)
    return [reader.read(t, scheduler) for t in scheduler.timesteps[start:]]


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
    reader = StepReader(0.4)
    assert [reader.read(t, None).early for t in (999, 600, 599, 0)] == [True, True, False, False]
    assert not reader.read(0, None).opens_without_early
    assert reader.read(torch.tensor([999, 3]), None).early  # of a batch the noisiest counts


def test_runs_are_told_apart():
    scheduler = diffusers.DDIMScheduler(**BETAS)
    scheduler.set_timesteps(10)
    reader = StepReader(0.4)
    assert not any(s.opens_without_early for s in walk(scheduler, reader))
    assert not any(s.opens_without_early for s in walk(scheduler, reader)[:2])  # the run breaks off here
    late = walk(scheduler, reader, start=5)  # img2img that starts late
    assert [s.opens_without_early for s in late] == [True] + [False] * 4
    assert not any(s.opens_without_early for s in walk(scheduler, reader, start=2))
    scheduler.set_timesteps(20)
    assert sum(s.early for s in walk(scheduler, reader)) == 8


def test_a_scheduler_that_makes_its_list_anew_at_each_look_opens_no_new_runs():
    class Fickle:
        @property
        def timesteps(self):
            return torch.arange(900, -1, -100)

    reader, scheduler = StepReader(0.4), Fickle()
    steps = [reader.read(t, scheduler) for t in scheduler.timesteps]
    assert [s.early for s in steps] == [True] * 4 + [False] * 6
    assert not any(s.opens_without_early for s in steps)
