"""What cached steps got wrong, made up for by the computed step after them."""

import copy
from dataclasses import replace

import diffusers
import pytest
import torch
from cache_twin import entrance
from callers import RUN, Caller, deep_unet
from tiny import BETAS, may_skip
from tiny import training_sigma as sigma

from agentsd import Recipe, StepCache, apply_agentsd
from agentsd.cache.correction import correction
from agentsd.hosts.schedulers import Sampler

SAMPLERS = {
    "DDIM": lambda **more: diffusers.DDIMScheduler(**BETAS, clip_sample=False, set_alpha_to_one=True, **more),
    "Euler": lambda **more: diffusers.EulerDiscreteScheduler(**BETAS, **more),
    "Karras": lambda **more: diffusers.EulerDiscreteScheduler(**BETAS, use_karras_sigmas=True, **more),
    "DPM-Solver++": lambda **more: diffusers.DPMSolverMultistepScheduler(**BETAS, solver_order=1, **more),
}


class Gaussian:
    """The exact model of normal data of unit variance, in any form of prediction."""

    def __init__(self, scheduler, mean):
        self.scheduler, self.mean = scheduler, mean
        self.kept = scheduler.alphas_cumprod.double()

    def __call__(self, sample, t):
        sample = self.scheduler.scale_model_input(sample, t)
        sigmas = getattr(self.scheduler, "sigmas", None)
        if sigmas is None:
            kept = self.kept[int(t)]
        else:
            kept = 1 / (1 + float(sigmas[self.scheduler.timesteps.tolist().index(float(t))]) ** 2)
            kept = torch.tensor(kept, dtype=torch.float64)
        clean = kept.sqrt() * sample + (1 - kept) * self.mean
        noise = (sample - kept.sqrt() * clean) / (1 - kept).sqrt()
        kind = self.scheduler.config.prediction_type
        velocity = kept.sqrt() * noise - (1 - kept).sqrt() * clean
        return {"epsilon": noise, "sample": clean, "v_prediction": velocity}[kind]


@pytest.mark.parametrize("prediction_type", ["epsilon", "v_prediction", "sample"])
@pytest.mark.parametrize("name", SAMPLERS)
def test_on_a_gaussian_the_latent_is_where_it_would_have_been(name, prediction_type):
    """After each corrected step, whatever the steps before it predicted wrong."""
    rng = torch.Generator().manual_seed(0)
    latents, mean = torch.randn(2, 3, 4, generator=rng, dtype=torch.float64)
    runs, cached = [], {3, 5, 6, 8, 9, 10}
    for wrong in (0.0, 0.5):
        scheduler = SAMPLERS[name](prediction_type=prediction_type)
        scheduler.set_timesteps(13)
        model, now = Gaussian(scheduler, mean), latents * scheduler.init_noise_sigma
        levels, seen = Sampler(scheduler, scheduler.timesteps.tolist()).steps(), []
        steps: list = []
        errors: list = []
        for i, t in enumerate(scheduler.timesteps):
            out = model(now, t)
            if i in cached:
                error = wrong * torch.randn(out.shape, generator=rng, dtype=torch.float64)
                out = out + error
                steps.append(levels[i])
                errors.append(error)
            elif errors:
                out = out + correction(steps, errors, levels[i])
                steps, errors = [], []
            now = scheduler.step(out, t, now, return_dict=False)[0]
            seen.append(now)
        runs.append(seen)
    for i, (one, other) in enumerate(zip(*runs, strict=True)):
        off = (one - other).abs().max()
        assert off > 1e-3 if i in cached else off < 1e-5


def test_no_step_before_is_no_correction():
    scheduler = SAMPLERS["DDIM"]()
    scheduler.set_timesteps(10)
    assert correction([], [], Sampler(scheduler, scheduler.timesteps.tolist()).steps()[0]) is None


@pytest.mark.parametrize(
    ("scheduler", "corrected"),
    [
        (diffusers.DDIMScheduler(**BETAS), True),
        (diffusers.UniPCMultistepScheduler(**BETAS), True),
        (diffusers.DEISMultistepScheduler(**BETAS), True),
        (diffusers.EulerDiscreteScheduler(**BETAS), True),
        (diffusers.DPMSolverMultistepScheduler(**BETAS, use_karras_sigmas=True), True),
        (diffusers.DPMSolverSinglestepScheduler(**BETAS), False),
        (diffusers.HeunDiscreteScheduler(**BETAS), False),
        (diffusers.KDPM2DiscreteScheduler(**BETAS), False),
        (diffusers.PNDMScheduler(**BETAS, skip_prk_steps=True), False),
        (diffusers.DDIMInverseScheduler(**BETAS), False),
    ],
)
def test_samplers(make_pipeline, sample, scheduler, corrected):
    pipe = make_pipeline(scheduler=copy.deepcopy(scheduler))
    handle = apply_agentsd(pipe, mode="step-caching")
    image = sample(pipe, **RUN)
    assert ("corrected" in handle.summary()) == corrected
    apply_agentsd(pipe, recipe=Recipe(steps=replace(handle.recipe.steps, correct=False)))
    assert torch.equal(sample(pipe, **RUN), image) != corrected


def test_without_a_scheduler_noise_levels_are_stable_diffusions_and_nothing_is_corrected():
    timesteps = [901.0, 601.0, 301.0, 1.0]
    sampler = Sampler(None, timesteps)
    assert [sampler.coordinate(i) for i in range(4)] == [sigma(t) for t in timesteps]
    assert sampler.steps() == [None] * 4


@pytest.mark.parametrize("order", [0, 1])
def test_states_on_a_line_between_computed_steps_need_no_correction_of_order_1(order):
    """The cached steps are then right from the second on."""
    unet, twin, caller = deep_unet(), deep_unet(), Caller(steps=12)
    rng = torch.Generator().manual_seed(0)
    base, slope = (torch.randn(2, 16, 16, 16, generator=rng) for _ in range(2))
    now = {}
    for model in (unet, twin):
        entrance(model).register_forward_hook(
            may_skip(lambda m, args, out: (base + now["sigma"] * slope,) if not now["again"] else None)
        )
    handle = apply_agentsd(unet, recipe=Recipe(steps=StepCache(3, extrapolation_order=order, warmup_steps=2)))
    hook = handle._hook
    for i, kind in enumerate("FFffFffFffFf"):
        now["sigma"], now["again"] = sigma(float(caller.timesteps[i])), False
        entering = unet.register_forward_pre_hook(
            may_skip(lambda m, args, kind=kind: now.update(again=hook._recomputes or kind == "f"))
        )
        out, expected = caller(unet, i), None
        entering.remove()
        now["again"] = False
        expected = caller(twin, i)
        right = torch.allclose(out, expected, rtol=1e-4, atol=1e-4)
        assert right == (order == 1 or i < 2)
