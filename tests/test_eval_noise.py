"""The noise of images: each draw of its own, of an image alone, and of the seed alone."""

from itertools import combinations

import numpy as np
import pytest
import torch
from agentsd_eval import calibrate
from agentsd_eval.errors import EvalError
from agentsd_eval.images.methods import parse_method
from agentsd_eval.images.prompts import from_prompts
from agentsd_eval.images.sampling import sample
from agentsd_eval.presets import load_settings
from agentsd_eval.research import metric_validation
from agentsd_eval.research.settings import SubjectSettings
from agentsd_eval.settings import CalibrateSettings, CompareSettings, RunSettings
from diffusers import (
    DDIMScheduler,
    DDPMScheduler,
    DPMSolverMultistepScheduler,
    EulerAncestralDiscreteScheduler,
    KDPM2AncestralDiscreteScheduler,
    LCMScheduler,
    SASolverScheduler,
)
from PIL import Image
from tiny import BETAS as SD15

BETAS = SD15 | {"steps_offset": 1}
NOISY = [
    DDPMScheduler(**BETAS, clip_sample=False),
    EulerAncestralDiscreteScheduler(**BETAS),
    KDPM2AncestralDiscreteScheduler(**BETAS),
    LCMScheduler(**BETAS),
    DPMSolverMultistepScheduler(**BETAS, algorithm_type="sde-dpmsolver++"),
    SASolverScheduler(**BETAS),
]
SETTINGS = RunSettings(steps=3, scheduler="model", fewer_steps=(), samplers=())
BASELINE = parse_method("baseline", None, SETTINGS)


def draws(pipe, seeds, monkeypatch):
    """All normal numbers that images of these seeds take, in order, for each image."""
    drawn = [[] for _ in seeds]
    randn, turn = torch.randn, 0

    def noted(*args, **how):
        nonlocal turn
        made = randn(*args, **how)
        drawn[turn % len(seeds)].append(made.flatten())
        turn += 1
        return made

    with monkeypatch.context() as patch:
        patch.setattr(torch, "randn", noted)
        sample(pipe, BASELINE, from_prompts(["a cat"], len(seeds), seeds[0]), SETTINGS)
    return drawn


@pytest.mark.parametrize("scheduler", NOISY, ids=lambda one: type(one).__name__)
def test_no_noise_comes_twice(make_pipeline, scheduler, monkeypatch):
    """Not the initial noise as a step's, not a step's again, not another seed's: of 1,024 numbers, chance
    correlates no two by a fifth."""
    pipe = make_pipeline(scheduler=scheduler)
    drawn = draws(pipe, range(7, 9), monkeypatch)
    every = [one for of_an_image in drawn for one in of_an_image]
    assert len(every) >= 2 * 3
    assert {len(one) for one in every} == {4 * 16 * 16}
    for one, other in combinations(every, 2):
        assert abs(np.corrcoef(one, other)[0, 1]) < 0.2
    alone = draws(pipe, range(8, 9), monkeypatch)
    assert all(map(torch.equal, alone[0], drawn[1]))


def test_a_sampler_without_noise_starts_where_it_always_did(make_pipeline, monkeypatch):
    pipe = make_pipeline(scheduler=DDIMScheduler(**BETAS, clip_sample=False))
    [[initial]] = draws(pipe, range(7, 8), monkeypatch)
    assert torch.equal(initial, torch.randn(4 * 16 * 16, generator=torch.Generator().manual_seed(7)))


@pytest.mark.parametrize("kind", [CalibrateSettings, CompareSettings, RunSettings, SubjectSettings])
def test_a_seed_that_another_is_taken_for_is_refused(kind):
    """torch's generator on a CPU reads 32 bits of a seed."""
    first, same = (torch.Generator().manual_seed(seed) for seed in (5, 2**32 + 5))
    assert torch.equal(torch.randn(9, generator=first), torch.randn(9, generator=same))
    goal = {"speedup": 1.5} if kind is CalibrateSettings else {}
    load_settings(kind, None, {"seed": 2**32 - 1, **goal})
    with pytest.raises(EvalError, match="--seed = 4294967296: pass less than 4294967296"):
        load_settings(kind, None, {"seed": 2**32, **goal})


def test_so_are_seeds_that_follow_it(plain):
    assert from_prompts(["a cat"], 2, 2**32 - 2)[1].seed == 2**32 - 1
    with pytest.raises(EvalError, match=r"image 1 would have seed 4294967296: .*pass a smaller --seed"):
        from_prompts(["a cat"], 2, 2**32 - 1)
    with pytest.raises(ValueError, match=r"seed=4294967295: torch tells 4,294,967,296 seeds apart"):
        calibrate(plain, ["a cat"], held_out=["a dog"], speedup=1.3, seed=2**32 - 1)


def test_degradations_of_two_images_are_of_other_noise():
    """Alike on all images it would be a pattern, and intervals over images too narrow."""
    grey, lighter = (Image.new("RGB", (32, 32), (level,) * 3) for level in (100, 101))
    added = [
        np.asarray(metric_validation.noise(sigma, image), float) - np.asarray(image, float)
        for sigma, image in ((10, grey), (10, lighter), (10, grey), (20, grey))
    ]
    assert abs(np.corrcoef(added[0].ravel(), added[1].ravel())[0, 1]) < 0.2
    assert np.array_equal(added[0], added[2])
    assert np.corrcoef(added[0].ravel(), added[3].ravel())[0, 1] > 0.99  # its own, stronger
    assert [added[0].std(), added[3].std()] == pytest.approx([10, 20], rel=0.05)
