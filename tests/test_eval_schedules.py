"""Models of other noise levels or predictions than a sampler takes over: every command refuses, in a line."""

import inspect

import diffusers
import numpy as np
import pytest
import torch
from agentsd_eval.calibration.search import has_better_sampler
from agentsd_eval.cli import main
from agentsd_eval.errors import EvalError
from agentsd_eval.images.models import scheduler_like
from agentsd_eval.names import SAMPLERS
from agentsd_eval.research.__main__ import main as research
from commands import run
from tiny import BETAS

ZERO_SNR = {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
FLOW = {"use_flow_sigmas": True, "prediction_type": "flow_prediction"}
OTHERS = {
    "EDM": ("EDMEuler", {}),
    "EDM, DPM++": ("EDMDPMSolverMultistep", {"sigma_max": 80.0}),
    "flow": ("FlowMatchEulerDiscrete", {}),
    "flow, Heun": ("FlowMatchHeunDiscrete", {}),
    "flow by UniPC": ("UniPCMultistep", BETAS | FLOW),
    "flow by DPM++": ("DPMSolverMultistep", BETAS | FLOW),
    "flow by its prediction": ("DPMSolverMultistep", BETAS | {"prediction_type": "flow_prediction"}),
    "flow by its levels": ("UniPCMultistep", BETAS | {"use_flow_sigmas": True}),
    "continuous alone": ("EulerDiscrete", BETAS | {"timestep_type": "continuous"}),
    "consistency": ("CMStochasticIterative", {}),
    "continuous": ("EulerDiscrete", BETAS | {"timestep_type": "continuous", "sigma_max": 700.0}),
    "wider than trained": ("EulerDiscrete", BETAS | {"sigma_max": 700.0, "use_karras_sigmas": True}),
    "shifted": ("CogVideoXDDIM", {}),
    "Wuerstchen": ("DDPMWuerstchen", {}),
}
"""Schedulers of models that no sampler of ours suits."""


def made(kind, settings):
    return getattr(diffusers, f"{kind}Scheduler")(**settings)


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("other", OTHERS)
def test_no_sampler_takes_linear_betas_for_what_is_none(other, name):
    own = made(*OTHERS[other])
    with pytest.raises(EvalError) as told:
        scheduler_like(own, name)
    assert f"scheduler {name}: " in str(told.value)
    assert f"{type(own).__name__}; use --scheduler model --samplers none" in str(told.value)
    assert scheduler_like(own, "model") is own
    assert not has_better_sampler(own)


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize(
    ("prediction", "more"),
    [
        (prediction, more)
        for prediction in ("epsilon", "v_prediction", "sample")
        for more in ({}, ZERO_SNR, {"trained_betas": np.linspace(1e-4, 0.03, 500).tolist()})
        if (prediction, more) != ("epsilon", ZERO_SNR)  # noise says nothing of an image at its first level
    ],
)
def test_a_sampler_is_on_the_models_levels_and_takes_its_output_for_what_it_is(name, prediction, more):
    """A model that knows the image ends at it."""
    count = {"num_train_timesteps": 500} if "trained_betas" in more else {}
    own = diffusers.DDIMScheduler(**BETAS | more | count, prediction_type=prediction, clip_sample=False)
    try:
        found = scheduler_like(own, name)
    except EvalError:
        of_the_image = name == "plms" and prediction == "sample"
        assert of_the_image or (more is ZERO_SNR and (name == "plms" or name.endswith("karras")))
        return
    found.set_timesteps(30)
    clean = torch.linspace(-1, 1, 64).view(1, 1, 8, 8)
    noise = torch.randn(clean.shape, generator=torch.Generator().manual_seed(0))
    latent = noise * found.init_noise_sigma
    sigmas = np.sqrt(1 / np.maximum(own.alphas_cumprod, 2**-24) - 1)
    draws = "generator" in inspect.signature(found.step).parameters
    more_noise = {"generator": torch.Generator().manual_seed(1)} if draws else {}
    for t in found.timesteps:
        scaled = found.scale_model_input(latent, t)
        sigma = float(np.exp(np.interp(t, np.arange(len(sigmas)), np.log(sigmas))))
        a, s = (1 + sigma**2) ** -0.5, sigma * (1 + sigma**2) ** -0.5
        guess = (scaled - a * clean) / s
        output = {"epsilon": guess, "sample": clean, "v_prediction": a * guess - s * clean}[prediction]
        latent = found.step(output, t, latent, return_dict=False, **more_noise)[0]
    assert (latent - clean).abs().max() < 0.15


COMMANDS = {
    "table": ("--methods", "none"),
    "table, a row's sampler": ("--scheduler", "model", "--samplers", "none", "--methods", "fast/unipckarras"),
    "table, plain rows": ("--scheduler", "model", "--samplers", "unipckarras", "--methods", "none"),
    "check": (),
    "compare": (),
    "compare, a row's sampler": ("--scheduler", "model", "--samplers", "none", "--methods", "fast/ddim"),
    "latency": (),
    "latency, a row's sampler": ("--scheduler", "model", "--methods", "fast/ddim", "--scopes", "pipeline"),
    "calibrate": ("--speedup", "1.2"),
    "subject": ("--instance-prompt", "a sks cat", "--class-prompt", "a cat"),
    "priced": (),
    "priced, a row's sampler": ("--scheduler", "model", "--methods", "fast/ddim"),
    "metric-validation": (),
}


@pytest.fixture(scope="module", params=["EDM", "flow by UniPC"])
def folder(request, make_pipeline, tmp_path_factory):
    path = tmp_path_factory.mktemp("other")
    make_pipeline(scheduler=made(*OTHERS[request.param])).save_pretrained(path)
    return path


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_refuses_before_any_work(command, folder, photographs, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.nn.Conv2d, "forward", lambda *args: pytest.fail("the model ran"))
    name = command.partition(",")[0]
    words = [name, "--model", folder, *COMMANDS[command]]
    words += ["--subject", photographs] if name == "subject" else []
    words += ["--out", tmp_path / {"compare": "x.png", "calibrate": "x.json"}.get(name, "x")]
    program = research if name in ("priced", "metric-validation", "subject") else main
    told = run(*words, code=2, program=program).output
    assert "use --scheduler model --samplers none, and no NAME/SAMPLER" in told
    assert len(told.strip().splitlines()) == 1
