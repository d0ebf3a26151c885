"""What a run's scheduler makes of the U-Net's outputs: its impulse response, and each call's noise level.

A scheduler's latent is linear in the U-Net's outputs. So a copy of it that is stepped once through the run's
list, on an output of 1 in call j and 0 in all others, tells what call j adds to each later latent: whatever
the sampler is, with the history of multistep samplers, the calls that share a step (PLMS, Heun), ancestral
noise, and any last steps.
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
_LEAST_ALPHA = 2.0**-24  # under zero terminal SNR the first is 0, whose noise level is infinite
_LARGE = 1000.0  # an output that clipping and thresholding would change
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

They are of its noise level and of the deviation of data: 1, or EDM's own, whose models predict velocities (of
either sign).
"""
_LEAST_SIGMA = 1e-6
_NEW = 0.9  # of a latent's noise; an ancestral step that lowers it by 40% renews 0.8
_LEAST_SHARE = 0.1  # of noise in a latent


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


def impulse_response(scheduler: Any, begin: int = 0) -> ImpulseResponse | None:
    """The response of a scheduler that is about to make the call at index `begin` of its list.

    Nothing of it is touched, and no global random number is drawn.

    Returns:
        None where it can't be had: the scheduler is not linear in the output (thresholding, clipping), or it
        can't be copied and stepped alone.
    """
    try:
        state = state_of(scheduler)
        latents, scales = _step_through(scheduler, state, begin, pulse=1.0)
        units, large, idle, start = _numbers(len(scales))
        noisy = bool(latents[:, idle].any())
        response = latents - _step_through(scheduler, state, begin, pulse=0.0)[0] if noisy else latents
    except Exception:  # a scheduler by anyone: it wants what a pipeline would give it
        return None
    tolerance = 1e-4 * _LARGE * np.abs(response[:, units]).max(initial=1.0)
    curved = np.abs(response[:, large] - _LARGE * response[:, units]).max(initial=0.0) > tolerance
    if curved or not np.isfinite(response).all():
        return None
    return ImpulseResponse(response[:, units], response[:, start], scales, noisy)


def _numbers(calls: int) -> tuple[slice, slice, int, int]:
    """What each number of a latent that is stepped through a run shows; they know nothing of each other.

    A number for each call whose output is 1 in that call alone, and one where it is 1,000; one that gets no
    output, and shows the sampler's own noise; and one that begins at 1.
    """
    return slice(calls), slice(calls, 2 * calls), 2 * calls, 2 * calls + 1


def _step_through(
    scheduler: Any, state: dict[str, Any], begin: int, pulse: float
) -> tuple[np.ndarray, np.ndarray]:
    """The latents of a run in these numbers, times `pulse`, and the scale of each call's input."""
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
            before = latents[-1].clone()  # which a sampler may write into
            latent = copy.step(output, timesteps[i], before, return_dict=False, **more)[0].float()
            latents.append(latent)
    return torch.cat(latents).flatten(1).double().numpy(), scales


def state_of(scheduler: Any) -> dict[str, Any]:
    """What a scheduler holds, copied, on the CPU: its config, lists and history.

    Functions that were put on it in place of its own (a logger around `step`, `torch.compile`'s) are left
    out, so that what runs on the copy is the class's own and touches nothing else.

    Raises:
        TypeError: it holds something that has more than a value: a model, a function, a generator.
    """
    kind = type(scheduler)
    own = {
        name: value
        for name, value in vars(scheduler).items()
        if not (callable(value) and callable(getattr(kind, name, None)))
    }
    return {name: _copied(value) for name, value in own.items()}


def fingerprint(scheduler: Any) -> bytes | None:
    """What two schedulers of one behaviour share; None where one can't be told."""
    try:
        return pickle.dumps((type(scheduler), tree_map_only(Tensor, Tensor.tolist, state_of(scheduler))))
    except Exception:  # it holds what can't be copied or written down
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
    """What is drawn within is not missing afterwards; nothing is set where nothing was drawn."""
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
    """What is known of a run's scheduler; of none, what its timesteps say of Stable Diffusion's.

    Args:
        scheduler: a diffusers scheduler, or None where it is not known.
        timesteps: of the run, in its order.

    Attributes:
        is_flow: its latents are (1 - sigma) data + sigma noise; else they are data + sigma noise, scaled.
        sigmas: the noise level of each call, over which features are extrapolated; None where it isn't known.
        step_of_call: what tells of which step each call is. Calls on one noise level share theirs (PLMS,
            Heun); rounded timesteps may repeat at levels of their own (Karras spacing of many steps).
    """

    def __init__(self, scheduler: Any, timesteps: Sequence[float]) -> None:
        config: Any = getattr(scheduler, "config", None) or {}
        predicts, edm = config.get("prediction_type"), config.get("sigma_data")
        unnamed = hasattr(scheduler, "scale_noise") and predicts is None
        self.is_flow = unnamed or predicts == "flow_prediction" or bool(config.get("use_flow_sigmas"))
        self._predicts = "flow_prediction" if self.is_flow else "v_prediction" if edm else predicts
        self._spread = edm or 1.0  # the deviation of data
        self.sigmas: list[float] | None = None
        own = getattr(scheduler, "sigmas", None)
        if isinstance(own, Tensor) and len(own) == len(timesteps) + 1:
            self.sigmas = list(map(float, own.tolist()))[:-1]
        elif timesteps and not (edm or self.is_flow or config.get("timestep_type") == "continuous"):
            levels = training_sigmas(scheduler)
            if min(timesteps) >= 0 and 1 < max(timesteps) <= len(levels):  # else they are functions of sigma
                self.sigmas = np.interp(timesteps, np.arange(len(levels)), levels).tolist()
        self.step_of_call = list(zip(timesteps, self.sigmas or timesteps, strict=True))

    def new_noise(self, deterministic: bool) -> list[float]:
        """For each call the share of its latent that is nearly all its noise, a root mean square.

        It is never so little as a nudge is, and infinite where a step takes more than 40% off the noise level
        under a sampler that may renew nearly all of it.
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
        """How far an error of the model's input moves its output, dF/dx, on Gaussian data.

        Of x = data + sigma noise the best guess at data moves by dD/dx = d^2 / (d^2 + sigma^2), and as
        D = c_skip x + c_out F(c_in x), F moves by what is left of that. Velocities do not move at all.
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
