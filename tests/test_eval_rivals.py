"""Rivals that leave calls out: forecasts of the clean latent, and T-GATE."""

import pytest
import torch
from agentsd_eval.pictures.forecast import FULL_AT_FIRST, Forecast
from agentsd_eval.pictures.methods import parse_method
from agentsd_eval.settings import CompareSettings
from diffusers import DPMSolverMultistepScheduler
from tgate import TgateSDLoader
from tiny import BETAS


class Linear:
    """A U-Net whose clean latent is linear in sigma, and which counts its calls."""

    def __init__(self, scheduler):
        self.scheduler, self.calls = scheduler, 0

    def sigma(self, t):
        alpha = self.scheduler.alphas_cumprod[int(t)].double()
        return alpha, ((1 - alpha) / alpha).sqrt()

    def __call__(self, sample, t, **kwargs):
        self.calls += 1
        alpha, sigma = self.sigma(t)
        clean = torch.linspace(-1, 1, sample.numel()).reshape(sample.shape).double() * (1 + 0.3 * sigma)
        noise = (sample - alpha.sqrt() * clean) / (1 - alpha).sqrt()
        if self.scheduler.config.prediction_type == "epsilon":
            return (noise,)
        return (alpha.sqrt() * noise - (1 - alpha).sqrt() * clean,)


@pytest.mark.parametrize("prediction_type", ["epsilon", "v_prediction"])
def test_a_clean_latent_that_is_linear_in_sigma_is_forecast_exactly(prediction_type):
    scheduler = DPMSolverMultistepScheduler(**BETAS, prediction_type=prediction_type, use_karras_sigmas=True)
    scheduler.set_timesteps(12)
    unet, truth = Linear(scheduler), Linear(scheduler)
    forecast = Forecast(unet, scheduler, 3)
    for run in (1, 2):  # the second begins anew
        for place, t in enumerate(scheduler.timesteps):
            sample = torch.randn(2, 4, 3, 3, generator=torch.Generator().manual_seed(place)).double()
            given = forecast(sample, t, encoder_hidden_states=None)[0]
            assert torch.allclose(given, truth(sample, t)[0], rtol=1e-3, atol=1e-3)
        computed = FULL_AT_FIRST + len(range(FULL_AT_FIRST, 12, 3))
        assert unet.calls == run * computed


def test_forecasts_leave_the_calls_out(make_pipeline):

    pipe, calls = make_pipeline(), []
    pipe.scheduler = DPMSolverMultistepScheduler(**BETAS)
    pipe.unet.conv_in.register_forward_hook(lambda *args: calls.append(1))
    with parse_method("forecast-2", None, CompareSettings()).applied(pipe):
        pipe("a cat", num_inference_steps=10, output_type="latent")
    assert len(calls) == 7  # of 10: four, and then one in two
    assert "forward" not in pipe.unet.__dict__


def test_tgate_is_its_packages_own_run(make_pipeline):

    def run(call, **settings):
        noise = torch.Generator().manual_seed(0)
        return call("a cat", num_inference_steps=6, generator=noise, output_type="latent", **settings).images

    theirs = run(TgateSDLoader(make_pipeline()).tgate, gate_step=3)
    pipe, rows = make_pipeline(), []
    pipe.unet.conv_in.register_forward_pre_hook(lambda module, args: rows.append(len(args[0])))
    with parse_method("tgate-3", None, CompareSettings()).applied(pipe):
        assert torch.equal(run(pipe), theirs)
    assert rows == [2] * 4 + [1] * 3  # PLMS has a call more than steps; later ones are not guided
