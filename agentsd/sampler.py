"""A scheduler's impulse response to the U-Net's outputs, and the noise level of each call.

Unless a scheduler clips or thresholds, its latents are linear in the U-Net's outputs. So a copy of the
scheduler is stepped once through the run, with an output of 1 in call j and 0 in all others. Its latents show
what the output of call j adds to each later latent. This covers any sampler: the history of multistep
samplers, calls that share a step (PLMS, Heun), ancestral noise, special last steps.
"""

from __future__ import annotations

import inspect
import math
import pickle
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import torch
from diffusers import SchedulerMixin
from torch import Tensor
from torch.utils._pytree import tree_map_only

from .foreign import is_known

_BETAS = np.linspace(0.00085**0.5, 0.012**0.5, 1000) ** 2
_ALPHAS = np.cumprod(1 - _BETAS)
_LEAST_ALPHA = 2.0**-24  # with zero terminal SNR one alpha is 0, and its noise level infinite
_LARGE = 1000.0  # an output that clipping or thresholding would change
_VALUES = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    np.ndarray,
    np.generic,
    Mapping,
    Enum,
    torch.dtype,
    torch.device,
)
_SCALINGS: dict[str, Callable[[float, float], tuple[float, float, float]]] = {
    "epsilon": lambda sigma, d: (1.0, -sigma, 1 / math.hypot(1, sigma)),
    "sample": lambda sigma, d: (0.0, 1.0, 1 / math.hypot(1, sigma)),
    "original_sample": lambda sigma, d: (0.0, 1.0, 1 / math.hypot(1, sigma)),
    "v_prediction": lambda sigma, d: (
        d**2 / (d**2 + sigma**2),
        -sigma * d / math.hypot(d, sigma),
        1 / math.hypot(d, sigma),
    ),
    "flow_prediction": lambda sigma, d: (1.0, -sigma, 1.0),
}
"""c_skip, c_out and c_in of a model by what it predicts, as in k-diffusion's `get_scalings`.

They are functions of the noise level and of the data's standard deviation. That is 1, or EDM's own, whose
models predict velocities (of either sign).
"""
_LEAST_SIGMA = 1e-6
_NEW = 0.9  # share of a latent's noise; an ancestral step that lowers the noise by 40% renews 0.8 of it
_LEAST_SHARE = 0.1  # smallest share of noise in a latent that is assumed


@dataclass(frozen=True)
class ImpulseResponse:
    """The latents of a run as a sum over the outputs of its calls: x_n = A[n] x_0 + sum_j R[n, j] F_j.

    Attributes:
        outputs: (calls + 1, calls) R: what a unit output of call j adds to the latent of call n.
        latent: (calls + 1,) A: what a unit of the run's first latent adds.
        input_scale: (calls,) the factor of `scale_model_input` in each call.
        noisy: whether the sampler adds noise of its own.
    """

    outputs: np.ndarray
    latent: np.ndarray
    input_scale: np.ndarray
    noisy: bool


def impulse_response(scheduler: Any, begin: int = 0) -> ImpulseResponse | None:
    """Return the response of a scheduler whose next call is at index `begin` of its list.

    The scheduler is not touched, and no global random number is drawn.

    Returns:
        None if the scheduler is not linear in the output (thresholding, clipping), or if a copy of it can't
        be made and stepped.
    """
    try:
        state = state_of(scheduler)
        latents, scales = _step_through(scheduler, state, begin, pulse=1.0)
        units, large, zero, start = _columns(len(scales))
        noisy = bool(latents[:, zero].any())
        response = latents - _step_through(scheduler, state, begin, pulse=0.0)[0] if noisy else latents
    except Exception:  # anyone's scheduler, which may need what only a pipeline gives it
        return None
    tolerance = 1e-4 * _LARGE * np.abs(response[:, units]).max(initial=1.0)
    curved = np.abs(response[:, large] - _LARGE * response[:, units]).max(initial=0.0) > tolerance
    if curved or not np.isfinite(response).all():
        return None
    return ImpulseResponse(response[:, units], response[:, start], scales, noisy)


def _columns(calls: int) -> tuple[slice, slice, int, int]:
    """Return what the numbers of the test latent are for. A scheduler treats each number by itself.

    1. One number for each call, which gets the output 1 in that call.
    2. One number for each call, which gets the output 1,000 in that call.
    3. One number that gets no output. It shows the sampler's own noise.
    4. One number that starts at 1 and gets no output.
    """
    return slice(calls), slice(calls, 2 * calls), 2 * calls, 2 * calls + 1


def _step_through(
    scheduler: Any, state: dict[str, Any], begin: int, pulse: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return the test latents of a run, all inputs times `pulse`, and each call's input scale."""
    copy = _with_state(scheduler, state)
    timesteps = copy.timesteps
    calls = len(timesteps)
    latent = torch.zeros(1, 1, 1, 2 * calls + 2, dtype=torch.float32, device="cpu")
    latent[..., -1] = pulse
    more: dict[str, Any] = {}
    if "generator" in inspect.signature(copy.step).parameters:
        more["generator"] = torch.Generator("cpu").manual_seed(0)
    latents, scales = [latent] * (begin + 1), np.ones(calls)
    with torch.no_grad(), torch.device("cpu"), _global_random_numbers_kept():
        for i in range(begin, calls):
            output = torch.zeros_like(latent)
            output[..., i], output[..., calls + i] = pulse, _LARGE * pulse
            one = torch.ones(1, 1, 1, 1, dtype=torch.float32)
            scales[i] = float(copy.scale_model_input(one, timesteps[i]))
            before = latents[-1].clone()  # a sampler may write into it
            latent = copy.step(output, timesteps[i], before, return_dict=False, **more)[0].float()
            latents.append(latent)
    return torch.cat(latents).flatten(1).double().numpy(), scales


def state_of(scheduler: Any) -> dict[str, Any]:
    """Return a copy of a scheduler's state, on the CPU: its config, lists and history.

    Methods that were replaced on the instance (by a logger around `step`, by `torch.compile`) are left out.
    So the copy runs the class's own methods and touches nothing else.

    Raises:
        TypeError: the state holds more than plain values: a model, a function, a generator.
    """
    kind = type(scheduler)
    own = {
        name: value
        for name, value in vars(scheduler).items()
        if not (callable(value) and callable(getattr(kind, name, None)))
    }
    return {name: _copied(value) for name, value in own.items()}


def fingerprint(scheduler: Any) -> bytes | None:
    """Return bytes that are equal for schedulers that behave alike; None if the state can't be copied."""
    try:
        return pickle.dumps((type(scheduler), tree_map_only(Tensor, Tensor.tolist, state_of(scheduler))))
    except Exception:  # it holds something that can't be copied or pickled
        return None


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, SchedulerMixin):  # UniPC's `solver_p`
        return _with_state(value, state_of(value))
    if isinstance(value, list | tuple | set | deque):
        return type(value)(map(_copied, value))
    if type(value) is dict:
        return {name: _copied(one) for name, one in value.items()}
    if isinstance(value, _VALUES) or (inspect.isfunction(value) and is_known(value)):
        return deepcopy(value)
    raise TypeError(f"a {type(value).__name__} can't be copied")


def _with_state(scheduler: Any, state: dict[str, Any]) -> Any:
    copy = object.__new__(type(scheduler))
    vars(copy).update(deepcopy(state))
    return copy


@contextmanager
def _global_random_numbers_kept() -> Iterator[None]:
    """Restore the global random states afterwards; set none from which nothing was drawn."""
    generator = torch.default_generator
    before = generator.get_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        if not torch.equal(generator.get_state(), before[0]):
            generator.set_state(before[0])
        if pickle.dumps(np.random.get_state()) != pickle.dumps(before[1]):
            np.random.set_state(before[1])
        if random.getstate() != before[2]:
            random.setstate(before[2])


class Sampler:
    """What is known of a run's scheduler. Without one, Stable Diffusion's noise schedule is assumed.

    Args:
        scheduler: a diffusers scheduler, or None if it isn't known.
        timesteps: the run's timesteps, in order.

    Attributes:
        is_flow: latents are (1 - sigma) data + sigma noise; otherwise data + sigma noise, up to a scale.
        sigmas: the noise level of each call, over which features are extrapolated; None if unknown.
        step_of_call: a key for each call's step. Calls at one noise level share a step (PLMS, Heun). With
            Karras spacing and many steps, rounded timesteps may repeat at different noise levels.
    """

    def __init__(self, scheduler: Any, timesteps: Sequence[float]) -> None:
        config: Any = getattr(scheduler, "config", None) or {}
        predicts, edm = config.get("prediction_type"), config.get("sigma_data")
        unnamed = hasattr(scheduler, "scale_noise") and predicts is None
        self.is_flow = unnamed or predicts == "flow_prediction" or bool(config.get("use_flow_sigmas"))
        self._predicts = "flow_prediction" if self.is_flow else "v_prediction" if edm else predicts
        self._spread = edm or 1.0  # standard deviation of the data
        self.sigmas: list[float] | None = None
        own = getattr(scheduler, "sigmas", None)
        if isinstance(own, Tensor) and len(own) == len(timesteps) + 1:
            self.sigmas = list(map(float, own.tolist()))[:-1]
        elif timesteps and not (edm or self.is_flow or config.get("timestep_type") == "continuous"):
            levels = training_sigmas(scheduler)
            if min(timesteps) >= 0 and 1 < max(timesteps) <= len(levels):  # else they are made from sigma
                self.sigmas = np.interp(timesteps, np.arange(len(levels)), levels).tolist()
        self.step_of_call = list(zip(timesteps, self.sigmas or timesteps, strict=True))

    def new_noise(self, deterministic: bool) -> list[float]:
        """Return, for each call, the share (RMS) of its latent that would mean nearly all new noise.

        The share is always larger than a nudge. It is infinite after a step that lowers the noise level by
        more than 40% if the sampler adds noise, as such a step may renew nearly all of it.
        """
        if self.sigmas is None:
            return [_NEW] * len(self.step_of_call)
        limits, before = [], 0.0
        for sigma in self.sigmas:
            data = 1 - sigma if self.is_flow else self._spread
            share = max(sigma / math.hypot(sigma, data), _LEAST_SHARE)
            limits.append(_NEW * share if deterministic or sigma > 0.6 * before else math.inf)
            before = sigma
        return limits

    def sensitivity(self, call: int) -> float:
        """Return how far an error of the model's input moves its output, dF/dx, for Gaussian data.

        For x = data + sigma noise, the best estimate of the data moves by dD/dx = d^2 / (d^2 + sigma^2).
        As D = c_skip x + c_out F(c_in x), F moves by (dD/dx - c_skip) / (c_out c_in). A velocity doesn't
        move at all.
        """
        if self.sigmas is None:
            return 0.0
        sigma, spread = max(self.sigmas[call], _LEAST_SIGMA), self._spread
        slope = spread**2 / (spread**2 + sigma**2)
        if self.is_flow:
            slope = (1 - sigma) / ((1 - sigma) ** 2 + sigma**2)
        c_skip, c_out, c_in = _SCALINGS.get(self._predicts, _SCALINGS["v_prediction"])(sigma, spread)
        return (slope - c_skip) / (c_out * c_in)


def training_sigmas(scheduler: Any = None) -> np.ndarray:
    """Return the noise level of each training timestep.

    If a scheduler doesn't say, Stable Diffusion's schedule is assumed: 14.6 at 999 and 0.03 at 0.
    """
    own = getattr(scheduler, "alphas_cumprod", None)
    known = isinstance(own, Tensor) and own.device.type != "meta"
    alphas = np.array(own.tolist()) if known else _ALPHAS  # type: ignore[union-attr]
    return np.sqrt(1 / np.maximum(alphas, _LEAST_ALPHA) - 1)


def is_for_few_steps(scheduler: Any) -> bool:
    """Return whether a scheduler is made for distilled few-step models (LCM, TCD, consistency models)."""
    boundary = "get_scalings_for_boundary_condition"
    own = "original_inference_steps" in (getattr(scheduler, "config", None) or {})
    return own or hasattr(scheduler, boundary) or hasattr(scheduler, f"{boundary}_discrete")
