"""Samplers, and a model that denoises under each: the exact one of Gaussian data, plus a tiny U-Net."""

import inspect
import math
from collections import namedtuple
from functools import partial

import diffusers
import torch
from tiny import BETAS, WIDTH, make_small_unet, may_skip

_EPS_V, _ALL = ("epsilon", "v_prediction"), ("epsilon", "v_prediction", "sample")


Sampling = namedtuple("Sampling", "make says predictions scaled", defaults=[False])
"""A scheduler as a user sets it up.

Attributes:
    make: makes it, with a prediction type.
    says: what the docs' table says of cached steps under it.
    predictions: what its model may predict.
    scaled: its latents are x = data + sigma noise, and the model sees them divided.
"""


def _of(name, says="corrected", predictions=_ALL, scaled=False, **config):
    kind = getattr(diffusers, f"{name}Scheduler")
    common = {} if name.startswith("EDM") else BETAS
    return Sampling(lambda **more: kind(**common | config | more), says, predictions, scaled)


_NOISE, _OFF = "corrected; says that noise is added", "off, with a warning"
_RISES = "off, as it goes up, with a warning"
ddim = partial(_of, "DDIM", clip_sample=False)
euler = partial(_of, "EulerDiscrete", scaled=True)
dpm = partial(_of, "DPMSolverMultistep")
ZERO_SNR = {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
EXPONENTIAL = {"use_exponential_sigmas": True, "final_sigmas_type": "sigma_min"}
FLOW = {"use_flow_sigmas": True, "flow_shift": 3.0}
SAMPLERS = {
    "DDIM": ddim(),
    "DDIM, zero terminal SNR, trailing": ddim(predictions=("v_prediction", "sample"), **ZERO_SNR),
    "DDIM, linspace": ddim(timestep_spacing="linspace"),
    "DDPM": _of("DDPM", _NOISE, clip_sample=False),
    "PLMS": _of("PNDM", predictions=_EPS_V, skip_prk_steps=True),
    "PNDM": _of("PNDM", predictions=_EPS_V),
    "Euler": euler(),
    "Euler, Karras": euler(use_karras_sigmas=True),
    "Euler, exponential, to sigma_min": euler(**EXPONENTIAL),
    "Euler, continuous timesteps": euler(timestep_type="continuous", use_karras_sigmas=True),
    "Euler a": _of("EulerAncestralDiscrete", _NOISE, _EPS_V, scaled=True),
    "Heun": _of("HeunDiscrete", scaled=True),
    "KDPM2": _of("KDPM2Discrete", predictions=_EPS_V, scaled=True),
    "KDPM2 a": _of("KDPM2AncestralDiscrete", _NOISE, _EPS_V, scaled=True),
    "DPM++ 2M": dpm(),
    "DPM++ 2M, Karras": dpm(use_karras_sigmas=True),
    "DPM++ 2M, leading": dpm(timestep_spacing="leading"),
    "DPM++ 2M, trailing": dpm(timestep_spacing="trailing"),
    "DPM++ 2M, to sigma_min": dpm(final_sigmas_type="sigma_min"),
    "DPM++ 2M, Lu's lambdas": dpm(use_lu_lambdas=True),
    "DPM++ 3M": dpm(solver_order=3),
    "DPM++ 2M SDE": dpm(_NOISE, algorithm_type="sde-dpmsolver++"),
    "DPM++ 2M, flow": dpm(predictions=("flow_prediction",), **FLOW),
    "DPM++ 2S": _of("DPMSolverSinglestep"),
    "DEIS": _of("DEISMultistep"),
    "UniPC": _of("UniPCMultistep"),
    "UniPC, Karras": _of("UniPCMultistep", use_karras_sigmas=True),
    "SA-Solver": _of("SASolver", _NOISE),
    "EDM Euler": _of("EDMEuler", predictions=_EPS_V),
    "EDM DPM++ 2M": _of("EDMDPMSolverMultistep", predictions=_EPS_V),
    "DDIM inversion": _of("DDIMInverse", _RISES, ("epsilon",), clip_sample=False),
    "LCM": _of("LCM", _OFF, ("epsilon",)),
    "TCD": _of("TCD", _OFF, ("epsilon",)),
    "consistency models": Sampling(
        lambda **more: diffusers.CMStochasticIterativeScheduler(), _OFF, ("sample",)
    ),
}


class Denoiser:
    """A U-Net whose output has the exact prediction for Gaussian data added, whatever it is to predict."""

    def __init__(self, sampling, prediction, steps=20, unknown=0.2):
        self.sampling, self.prediction = sampling, prediction
        more = {} if sampling.predictions == ("sample",) else {"prediction_type": prediction}
        self.scheduler = sampling.make(**more)
        self.scheduler.set_timesteps(steps)
        self.unet = make_small_unet()
        # A random embedding of timesteps is rough where a trained one is smooth.
        self.unet.time_embedding.register_forward_hook(may_skip(lambda module, args, out: 0 * out))
        self.unet.register_forward_pre_hook(may_skip(self._exact))
        self.unet.conv_out.register_forward_hook(may_skip(lambda m, args, out: unknown * out + self.exact))

    def _levels(self, timestep):
        """alpha, sigma and the data's deviation: x = alpha data + sigma noise."""
        scheduler = self.scheduler
        place = scheduler.timesteps.tolist().index(timestep)
        own = getattr(scheduler, "sigmas", None)
        if scheduler.config.get("use_flow_sigmas"):
            return 1 - float(own[place]), float(own[place]), 1.0
        if "sigma_data" in scheduler.config:
            return 1.0, float(own[place]), scheduler.config.sigma_data
        if own is None:
            kept = float(scheduler.alphas_cumprod[int(timestep)])
            return kept**0.5, (1 - kept) ** 0.5, 1.0
        sigma = float(own[place])
        if self.sampling.scaled:
            return 1.0, sigma, 1.0
        return (1 + sigma**2) ** -0.5, sigma * (1 + sigma**2) ** -0.5, 1.0

    def _exact(self, module, args):
        seen, timestep = args[0], float(args[1])
        alpha, sigma, spread = self._levels(timestep)
        edm = "sigma_data" in self.scheduler.config
        x = seen * math.hypot(sigma, spread) if edm or self.sampling.scaled else seen
        clean = self.mean + alpha * spread**2 / (alpha**2 * spread**2 + sigma**2) * (x - alpha * self.mean)
        noise = (x - alpha * clean) / sigma
        if edm:
            skip = spread**2 / (sigma**2 + spread**2)
            out = sigma * spread / math.hypot(sigma, spread) * (1 if self.prediction == "epsilon" else -1)
            self.exact = (clean - skip * x) / out
            return
        size = math.hypot(alpha, sigma)  # velocities are of latents of unit variance
        velocity = (alpha * noise - sigma * clean) / size
        known = {"epsilon": noise, "sample": clean, "v_prediction": velocity}
        self.exact = known.get(self.prediction, noise - clean)

    def run(self):
        scheduler, rng = self.scheduler, torch.Generator().manual_seed(0)
        scheduler.set_timesteps(scheduler.num_inference_steps)
        x = torch.randn(1, 4, 8, 8, generator=rng) * scheduler.init_noise_sigma
        self.mean = torch.randn(1, 4, 8, 8, generator=rng)
        text = torch.randn(1, 7, WIDTH, generator=rng)
        noisy = "generator" in inspect.signature(scheduler.step).parameters
        more = {"generator": rng} if noisy else {}
        with torch.no_grad(), torch.random.fork_rng():
            torch.manual_seed(0)
            for t in scheduler.timesteps:
                out = self.unet(scheduler.scale_model_input(x, t), t, text).sample
                x = scheduler.step(out, t, x, **more).prev_sample
        return x
