"""Every sampler that Stable Diffusion's pipelines take: what cached steps lose, and what corrections mend."""

import gc
from statistics import geometric_mean

import diffusers
import pytest
import torch
from logs import logged
from sampling import SAMPLERS, Denoiser, errors
from tiny import BETAS

from agentsd import Recipe, StepCache, apply_agentsd
from agentsd.hosts.schedulers import Sampler, find_scheduler

CACHE = {"interval": 2, "warmup_steps": 4}  # the last of 20 steps is computed, and corrects those before
CASES = [(name, kind) for name, sampling in SAMPLERS.items() for kind in sampling.predictions]
RATIOS = {}
"""By sampler and prediction: the loss of corrected runs, over that of others."""


def recipe(**more):
    return Recipe(steps=StepCache(**CACHE | more))


@pytest.mark.parametrize(("name", "prediction"), CASES)
def test_cached_steps(name, prediction):
    sampling = SAMPLERS[name]
    recipes = [recipe(), recipe(correct=False), recipe(correct=False, extrapolation_order=0)]
    (corrected, plain, kept), (summary, *_) = errors(sampling, prediction, recipes)
    if sampling.says.startswith("off"):
        assert corrected == 0
        assert set(summary.split()[0]) == {"F"}
        return
    assert "f" in summary
    assert ("corrected" in summary) == sampling.says.startswith("corrected")
    if sampling.says.startswith("not"):
        assert corrected == plain
    assert corrected <= 1.2 * plain
    assert max(kept, plain) < 0.05
    RATIOS[name, prediction] = corrected / plain


def test_corrections_pay():
    """Over all samplers that are corrected; runs after the others of this file."""
    mended = [ratio for (name, _), ratio in RATIOS.items() if SAMPLERS[name].says.startswith("corrected")]
    assert geometric_mean(mended) < 0.8


@pytest.mark.parametrize("name", SAMPLERS)
def test_what_is_said(name):
    sampling = SAMPLERS[name]
    model = Denoiser(sampling, sampling.predictions[0])
    apply_agentsd(model.unet, recipe=recipe())
    with logged() as messages:
        model.run()
    words = " ".join(messages)
    assert ("adds noise" in words) == ("noise is added" in sampling.says)
    assert ("for few steps" in words) == sampling.says.startswith("off")
    assert bool(words) == ("says" in sampling.says or "warning" in sampling.says)


def test_a_look_at_a_samplers_noise_leaves_the_users_random_state():
    scheduler = SAMPLERS["Euler a"].make()
    before = torch.get_rng_state()
    assert Sampler(scheduler, [1.0]).adds_noise()
    assert torch.equal(torch.get_rng_state(), before)


def test_the_scheduler_of_a_list_is_found_among_those_known_first():
    one, other = (diffusers.DDIMScheduler(**BETAS) for _ in range(2))
    for scheduler in (one, other):
        scheduler.set_timesteps(10)
    other.timesteps = one.timesteps
    assert find_scheduler(one.timesteps[3:], [other]) is other
    assert find_scheduler(one.timesteps, [None, one, other]) is one
    del other
    gc.collect()
    assert find_scheduler(one.timesteps, []) is one
    assert find_scheduler(one.timesteps.clone(), [one]) is None
    assert find_scheduler([1.0], [one]) is None
