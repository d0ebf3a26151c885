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
from collections.abc import Iterator, Mapping, Sequence
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
_NEW = 0.9  # of a latent's noise; an ancestral step that lowers it by 40% renews 0.8
_LEAST_SHARE = 0.1  # of noise in a latent
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

    Nothing of it is touched, and no global random number is drawn.

    Returns:
        None where it can't be had: the scheduler is not linear in the output (thresholding, clipping), or it
        can't be copied and stepped alone.
    """
    try:
        state = state_of(scheduler)
        driven = _step_through(scheduler, state, begin, drive=True)
        silent = driven[0][:, -2].any()
        still = _step_through(scheduler, state, begin, drive=False) if silent else driven
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


def _step_through(
    scheduler: Any, state: dict[str, Any], begin: int, drive: bool
) -> tuple[np.ndarray, np.ndarray]:
    """The latents of a run in numbers that know nothing of each other, and the scale of each call's input.

    A number for each call's output of 1, then of 1,000; one without any; and one that begins at 1.
    """
    copy = _with_state(scheduler, state)
    timesteps = copy.timesteps
    calls = len(timesteps)
    latent = torch.zeros(1, 1, 1, 2 * calls + 2, dtype=torch.float32, device="cpu")
    latent[..., -1] = float(drive)
    more: dict[str, Any] = {}
    if "generator" in inspect.signature(copy.step).parameters:
        more["generator"] = torch.Generator("cpu").manual_seed(0)
    latents, scales = [latent] * (begin + 1), np.ones(calls)
    with torch.no_grad(), torch.device("cpu"), _global_random_numbers_kept():
        for i in range(begin, calls):
            output = torch.zeros_like(latent)
            if drive:
                output[..., i], output[..., calls + i] = 1.0, _LARGE
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

    def new_noise(self, deterministic: bool) -> list[float]:
        """For each call the share of its latent that is nearly all its noise, a root mean square.

        Data are of unit variance (EDM: its own). It is never so little as a nudge is, and infinite
        where a step takes more than 40% off the noise level under a sampler that may renew nearly all of it.
        """
        if self.sigmas is None:
            return [_NEW] * len(self.timesteps)
        limits, before = [], 0.0
        for sigma in self.sigmas:
            data = 1 - sigma if self.is_flow else self._config.get("sigma_data") or 1.0
            share = max(sigma / math.hypot(sigma, data), _LEAST_SHARE)
            limits.append(_NEW * share if deterministic or sigma > 0.6 * before else math.inf)
            before = sigma
        return limits

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
