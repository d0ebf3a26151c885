"""Faults that were found and mended, each a test that the old code fails.

The run that calls is the one that is followed, also where its timesteps do not fall.
"""

import diffusers
import pytest
import torch
from callers import inputs
from logs import silent, warned
from recipes import AGENTS_THEN_KEYS
from tiny import BETAS, call, watch_phases

from agentsd import ByDistance, PooledAgents, Recipe, apply_agentsd


def denoise(unet, scheduler, steps=5, batch=2, **also):
    """A run of a bare U-Net: the last latents."""
    latent, text = inputs(batch=batch)
    scheduler.set_timesteps(steps)
    with torch.no_grad():
        for t in scheduler.timesteps:
            noise = unet(scheduler.scale_model_input(latent, t), t, text, **also).sample
            latent = scheduler.step(noise, t, latent).prev_sample
    return latent


@pytest.fixture
def no_warning():
    """Let a warning of agentsd's be an error."""
    with silent():
        yield


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (diffusers.DDIMScheduler, {}),
        (diffusers.DPMSolverMultistepScheduler, {"use_karras_sigmas": True}),
        (diffusers.EulerDiscreteScheduler, {"timestep_type": "continuous", "use_karras_sigmas": True}),
        (diffusers.EulerDiscreteScheduler, {"timestep_spacing": "trailing"}),
        (diffusers.LCMScheduler, {}),
    ],
)
@pytest.mark.usefixtures("no_warning")
def test_a_bare_unet_has_the_phases_of_its_pipeline(make_pipeline, kind, options):
    seen = []
    if options.get("timestep_type") == "continuous":
        options = options | {"prediction_type": "v_prediction", "sigma_min": 0.02, "sigma_max": 14.0}
    for bare in (False, True):
        scheduler = kind(**BETAS, **options)
        pipe = make_pipeline(scheduler=scheduler)
        handle = apply_agentsd(pipe.unet if bare else pipe, recipe=AGENTS_THEN_KEYS)
        phases = watch_phases(handle)
        seen.append((denoise(pipe.unet, scheduler, 10), phases))
    (of_pipe, phases), (of_bare, bare_phases) = seen
    assert phases == bare_phases
    assert set(map(tuple, phases.values())) == {("agent",) * 4 + ("downsample",) * 6}
    assert torch.equal(of_pipe, of_bare)


def test_a_pipeline_that_shares_the_unet_is_followed_by_its_own_scheduler(make_pipeline, sample):
    pipe = make_pipeline(scheduler=diffusers.DDIMScheduler(**BETAS))
    other = diffusers.AutoPipelineForText2Image.from_pipe(pipe)
    other.scheduler = diffusers.EulerDiscreteScheduler(
        **BETAS, timestep_type="continuous", prediction_type="v_prediction"
    )
    assert other.unet is pipe.unet
    phases = watch_phases(apply_agentsd(pipe, recipe=AGENTS_THEN_KEYS))
    seen = phases[next(iter(phases))]
    sample(pipe, num_inference_steps=10)
    assert seen == ["agent"] * 4 + ["downsample"] * 6
    seen.clear()
    sample(other, num_inference_steps=5)
    assert seen == ["agent"] * 2 + ["downsample"] * 3
    seen.clear()
    sample(pipe, num_inference_steps=20)
    assert seen == ["agent"] * 8 + ["downsample"] * 12


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
def test_no_false_word_of_a_missing_early_step(make_pipeline, sample, kind, options):
    pipe = make_pipeline(scheduler=kind(**BETAS, **options))
    steps = []
    pipe.unet.register_forward_pre_hook(lambda module, args: steps.append(float(args[1])))
    phases = watch_phases(apply_agentsd(pipe, recipe=AGENTS_THEN_KEYS))
    for _ in range(2):
        steps.clear()
        for seen in phases.values():
            seen.clear()
        assert sample(pipe, num_inference_steps=10).isfinite().all()  # a warning is an error here
        assert steps != sorted(steps, reverse=True)
        distinct = sorted(set(pipe.scheduler.timesteps.tolist()), reverse=True)
        early = set(distinct[: round(0.4 * len(distinct))])
        for seen in phases.values():
            assert seen == ["agent" if t in early else "downsample" for t in steps]


@pytest.mark.filterwarnings("ignore:__array_wrap__:DeprecationWarning")
@pytest.mark.parametrize(("kind", "options"), RISING)
def test_a_timestep_that_rises_opens_no_new_run(make_pipeline, sample, kind, options):
    pipe = make_pipeline(scheduler=kind(**BETAS, **options))
    phases = watch_phases(apply_agentsd(pipe, recipe=SHORT))
    sample(pipe, num_inference_steps=10)
    for seen in phases.values():
        assert seen.count("agent") == 1
        assert seen[0] == "agent"
    sample(pipe, num_inference_steps=10)
    for seen in phases.values():  # the next run is a new one
        assert seen == 2 * seen[: len(seen) // 2]


def test_a_guidance_cut_off_opens_no_new_run(make_pipeline, sample):
    pipe = make_pipeline(scheduler=diffusers.DDIMScheduler(**BETAS))
    batches = []
    pipe.unet.register_forward_pre_hook(lambda module, args: batches.append(args[0].shape[0]))

    def cut_off(pipe, step, t, tensors):
        if step == 2:
            pipe._guidance_scale = 0.0
            tensors["prompt_embeds"] = tensors["prompt_embeds"].chunk(2)[-1]
        return tensors

    phases = watch_phases(apply_agentsd(pipe, recipe=SHORT))
    callback = {"callback_on_step_end": cut_off, "callback_on_step_end_tensor_inputs": ["prompt_embeds"]}
    sample(pipe, num_inference_steps=6, **callback)
    assert batches == [2] * 3 + [1] * 3
    for seen in phases.values():
        assert seen == ["agent"] + ["baseline"] * 5
