"""What a run's scheduler makes of the U-Net's outputs: its impulse response, and each call's noise level.

A scheduler's latent is linear in the U-Net's outputs. So a copy of it that is stepped once through the run's
list, on an output of 1 in call j and 0 in all others, tells what call j adds to each later latent: whatever
the sampler is, with the history of multistep samplers, the calls that share a step (PLMS, Heun), ancestral
noise, and any last steps.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from diffusers import SchedulerMixin
from torch import Tensor

_BETAS = np.linspace(0.00085**0.5, 0.012**0.5, 1000) ** 2
_ALPHAS = np.cumprod(1 - _BETAS)
_LEAST_ALPHA = 2.0**-24  # under zero terminal SNR the first is 0, whose noise level is infinite
_LARGE = 1000.0  # an output that clipping and thresholding would change
_NEGLIGIBLE = 1e-5  # of the largest response: below it is float32's rounding


@dataclass(frozen=True)
class ImpulseResponse:
    """The latents of a run as a sum over the outputs of its calls: x_n = A[n] x_0 + sum_j R[n, j] F_j.

    Attributes:
        outputs: (calls + 1, calls) R: what a unit of the output of call j adds to the latent of call n.
        latent: (calls + 1,) A: what a unit of the run's first latent adds.
        input_scale: (calls,) what `scale_model_input` multiplies the latent of each call with.
        noisy: the sampler adds noise of its own.
    """

    outputs: np.ndarray
    latent: np.ndarray
    input_scale: np.ndarray
    noisy: bool

    def weights(self, at: int | slice, since: int) -> np.ndarray:
        """(..., calls) what each output's error adds to the latents `at`, that of call `since` being right.

        What came before `since` shows then in the history of a multistep sampler alone.
        """
        rows = self.outputs[at]
        if abs(self.latent[since]) > _NEGLIGIBLE:
            rows = rows - np.multiply.outer(self.latent[at] / self.latent[since], self.outputs[since])
        return np.where(np.abs(rows) > _NEGLIGIBLE * np.abs(self.outputs).max(), rows, 0.0)


def impulse_response(scheduler: Any, begin: int = 0) -> ImpulseResponse | None:
    """The response of a scheduler that is about to make the call at index `begin` of its list.

    Returns:
        None where it can't be had: the scheduler is not linear in the output (thresholding, clipping), or a
        copy of it can't be stepped alone.
    """
    try:
        driven = _step_through(scheduler, begin, drive=True)
        silent = driven[0][:, -2].any()
        still = _step_through(scheduler, begin, drive=False) if silent else driven
    except Exception:  # a scheduler by anyone: it wants what a pipeline would give it
        return None
    latents, scales = driven
    response = latents - still[0] if silent else latents
    calls = len(scales)
    units, large = response[:, :calls], response[:, calls : 2 * calls]
    tolerance = 1e-4 * _LARGE * np.abs(units).max(initial=1.0)
    if not np.isfinite(response).all() or np.abs(large - _LARGE * units).max(initial=0.0) > tolerance:
        return None
    return ImpulseResponse(units, response[:, -1], scales, bool(silent))


def _step_through(scheduler: Any, begin: int, drive: bool) -> tuple[np.ndarray, np.ndarray]:
    """The latents of a run in numbers that know nothing of each other, and the scale of each call's input.

    A number for each call's output of 1, then of 1,000; one without any; and one that begins at 1.
    """
    copy = _copy_on_cpu(scheduler)
    timesteps = copy.timesteps
    calls = len(timesteps)
    latent = torch.zeros(1, 1, 1, 2 * calls + 2, dtype=torch.float32, device="cpu")
    latent[..., -1] = float(drive)
    more: dict[str, Any] = {}
    if "generator" in inspect.signature(copy.step).parameters:
        more["generator"] = torch.Generator("cpu").manual_seed(0)
    latents, scales = [latent] * (begin + 1), np.ones(calls)
    with torch.no_grad(), torch.device("cpu"):
        for i in range(begin, calls):
            output = torch.zeros_like(latent)
            if drive:
                output[..., i], output[..., calls + i] = 1.0, _LARGE
            one = torch.ones(1, 1, 1, 1, dtype=torch.float32)
            scales[i] = float(copy.scale_model_input(one, timesteps[i]))
            latent = copy.step(output, timesteps[i], latents[-1], return_dict=False, **more)[0].float()
            latents.append(latent)
    return torch.cat(latents).flatten(1).double().numpy(), scales


def _copy_on_cpu(scheduler: Any) -> Any:
    copy = deepcopy(scheduler)
    for name, value in vars(copy).items():
        if isinstance(value, Tensor):
            setattr(copy, name, value.cpu())
    return copy


class Sampler:
    """What is known of a run's scheduler; of none, what its timesteps say of Stable Diffusion's.

    Args:
        scheduler: a diffusers scheduler, or None where it is not known.
        timesteps: of the run, in its order.

    Attributes:
        sigmas: the noise level of each call, over which features are extrapolated; None where it isn't known.
    """

    def __init__(self, scheduler: Any, timesteps: Sequence[float]) -> None:
        self._config: Any = getattr(scheduler, "config", None) or {}
        self._by_name = hasattr(scheduler, "scale_noise")
        self.timesteps = timesteps
        self.sigmas: list[float] | None = None
        own = getattr(scheduler, "sigmas", None)
        if isinstance(own, Tensor) and len(own) == len(timesteps) + 1:
            self.sigmas = list(map(float, own.tolist()))[:-1]
        elif timesteps and self._on_training_timesteps(levels := training_sigmas(scheduler)):
            self.sigmas = np.interp(timesteps, np.arange(len(levels)), levels).tolist()

    def _on_training_timesteps(self, levels: np.ndarray) -> bool:
        """Whether its timesteps are those of a training schedule, and not functions of sigma."""
        continuous = self._config.get("timestep_type") == "continuous"
        if self.is_edm or self.is_flow or continuous:
            return False
        return min(self.timesteps) >= 0 and 1 < max(self.timesteps) <= len(levels)

    @property
    def is_edm(self) -> bool:
        """Whether its model is preconditioned as EDM's are (Karras et al. 2022)."""
        return self._config.get("sigma_data") is not None

    @property
    def is_flow(self) -> bool:
        """Whether its latents are (1 - s) data + s noise."""
        prediction_type = self._config.get("prediction_type")
        by_name = self._by_name and prediction_type is None
        return by_name or prediction_type == "flow_prediction" or bool(self._config.get("use_flow_sigmas"))

    @property
    def step_of_call(self) -> list[Any]:
        """What tells of which step each call is: calls on one noise level share theirs (PLMS, Heun).

        Timesteps that are rounded may repeat at levels of their own (Karras spacing of many steps).
        """
        return list(zip(self.timesteps, self.sigmas or self.timesteps, strict=True))

    def gain(self, call: int) -> float:
        """How far an error of the model's input moves its output, dF/dx, on Gaussian data of unit variance.

        A velocity there does not depend on the latent at all, nor does EDM's output.
        """
        if self.sigmas is None or self.is_edm:
            return 0.0
        sigma = self.sigmas[call]
        if self.is_flow:
            return float((2 * sigma - 1) / ((1 - sigma) ** 2 + sigma**2))
        known = {"epsilon": sigma, "sample": 1.0, "original_sample": 1.0}
        return float(known.get(self._config.get("prediction_type"), 0.0) / (1 + sigma**2) ** 0.5)


def training_sigmas(scheduler: Any = None) -> np.ndarray:
    """The noise level of each training timestep: 14.6 at 999 and 0.03 at 0 in Stable Diffusion's schedule,
    which is taken where a scheduler says none."""
    own = getattr(scheduler, "alphas_cumprod", None)
    known = isinstance(own, Tensor) and own.device.type != "meta"
    alphas = np.array(own.tolist()) if known else _ALPHAS  # type: ignore[union-attr]
    return np.sqrt(1 / np.maximum(alphas, _LEAST_ALPHA) - 1)


def is_for_few_steps(scheduler: Any) -> bool:
    """Whether it is made for distilled models, whose steps are few (LCM, TCD, consistency models)."""
    boundary = "get_scalings_for_boundary_condition"
    own = "original_inference_steps" in (getattr(scheduler, "config", None) or {})
    return own or hasattr(scheduler, boundary) or hasattr(scheduler, f"{boundary}_discrete")


def holds(scheduler: Any, timesteps: Tensor | None) -> bool:
    """Whether a tensor is, or is a part of, a scheduler's list of timesteps."""
    own = getattr(scheduler, "timesteps", None)
    if timesteps is None or not isinstance(own, Tensor) or own.device.type == "meta":
        return False
    return own.untyped_storage().data_ptr() == timesteps.untyped_storage().data_ptr()


def schedulers_of(pipe: Any) -> list[Any]:
    """The schedulers among a pipeline's parts, its `scheduler` first."""
    first = getattr(pipe, "scheduler", None)
    parts = [part for part in vars(pipe).values() if isinstance(part, SchedulerMixin) and part is not first]
    return parts if first is None else [first, *parts]
