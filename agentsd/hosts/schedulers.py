"""What a scheduler says of the run that it makes: its timesteps, their noise levels, what its step does.

A thin wrapper, so that nothing else asks a scheduler of which class it is. It is found for the run that
calls: pipelines pass elements of their scheduler's list, and an element's storage is that list.

A step's latent x = alpha y holds data at the noise level sigma of y. The model's output F gives the denoised
latent D: what of D moves with F is `c_out` ("Elucidating the Design Space of Diffusion-Based Generative
Models", Karras et al. 2022, Table 1, for EDM; DPM-Solver++, Lu et al. 2022, section 3, for the others).
"""

from __future__ import annotations

import gc
import inspect
import weakref
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from diffusers import SchedulerMixin
from torch import Tensor

_BETAS = np.linspace(0.00085**0.5, 0.012**0.5, 1000) ** 2
_ALPHAS = np.cumprod(1 - _BETAS)
_LEAST = 2.0**-24  # under zero terminal SNR the first is 0, whose noise level is infinite


def training_sigmas(scheduler: Any = None) -> np.ndarray:
    """The noise level of each training timestep: 14.6 at 999 and 0.03 at 0 in Stable Diffusion's schedule,
    which is taken where a scheduler says none."""
    own = getattr(scheduler, "alphas_cumprod", None)
    known = isinstance(own, Tensor) and own.device.type != "meta"
    alphas = np.array(own.tolist()) if known else _ALPHAS  # type: ignore[union-attr]
    return np.sqrt(1 / np.maximum(alphas, _LEAST) - 1)


class SigmaStep(NamedTuple):
    """A sampler's step from one noise level to a lower one.

    A first-order step is y' = kept y + (1 - kept) D (DDIM; DPM-Solver++, Eq. 9).

    Attributes:
        sigma, sigma_next: noise levels of y.
        c_out: dD/dF, how the denoised latent moves with the model's output.
        variance: of the data, for what D does when y moves.
    """

    sigma: float
    sigma_next: float
    c_out: float
    variance: float = 1.0

    @property
    def kept(self) -> float:
        """Share of the latent in what the step makes."""
        return self.sigma_next / self.sigma

    @property
    def carried(self) -> float:
        """What becomes of an error of the latent in the step; dD/dy is that of Gaussian data."""
        return self.kept + (1 - self.kept) * self.variance / (self.variance + self.sigma**2)


class Sampler:
    """A run's scheduler, or what can be known of the run without it.

    Args:
        scheduler: a diffusers scheduler, or None where it is not known.
        timesteps: of the run, in its order.
    """

    def __init__(self, scheduler: Any, timesteps: Sequence[float]) -> None:
        self._scheduler = None if scheduler is None else weakref.ref(scheduler)  # a run keeps none alive
        self.timesteps = timesteps
        self._config: Any = getattr(scheduler, "config", None) or {}
        own = getattr(scheduler, "sigmas", None)
        fits = isinstance(own, Tensor) and len(own) == len(timesteps) + 1
        self._own: list[float] | None = list(map(float, own.tolist())) if fits else None  # type: ignore[union-attr]
        self._training = training_sigmas(scheduler)

    @property
    def scheduler(self) -> Any:
        """The scheduler, while it is in use elsewhere."""
        return None if self._scheduler is None else self._scheduler()

    @property
    def name(self) -> str:
        """Of the scheduler's class."""
        return type(self.scheduler).__name__

    @property
    def is_edm(self) -> bool:
        """Whether its model is preconditioned as EDM's are."""
        return self._has("precondition_outputs") and self._config.get("sigma_data") is not None

    @property
    def is_flow(self) -> bool:
        """Whether its latents are (1 - s) data + s noise."""
        prediction_type = self._config.get("prediction_type")
        by_name = self._has("scale_noise") and prediction_type is None
        return by_name or prediction_type == "flow_prediction" or bool(self._config.get("use_flow_sigmas"))

    @property
    def on_training_timesteps(self) -> bool:
        """Whether its timesteps are those of a training schedule, and not functions of sigma."""
        continuous = self._config.get("timestep_type") == "continuous"
        if self.is_edm or self.is_flow or continuous:
            return False
        return min(self.timesteps) >= 0 and 1 < max(self.timesteps) <= len(self._training)

    @property
    def for_few_steps(self) -> bool:
        """Whether it is made for distilled models, whose steps are few (LCM, TCD, consistency models)."""
        boundary = "get_scalings_for_boundary_condition"
        discrete = f"{boundary}_discrete"
        return "original_inference_steps" in self._config or self._has(boundary) or self._has(discrete)

    @property
    def calls_stand_alone(self) -> bool:
        """Whether each step is one call, and no step starts where another did (Heun, PLMS, singlestep).

        Timesteps that are rounded may repeat at noise levels of their own (Karras spacing of many steps).
        """
        if getattr(self.scheduler, "order", 1) > 1 or self._has("get_order_list"):
            return False
        falls = self._own is not None and all(one > other for one, other in pairwise(self._own))
        return falls or len(set(self.timesteps)) == len(self.timesteps)

    @property
    def step_of_call(self) -> Sequence[float]:
        """What tells for each call of the list which step it is of."""
        return range(len(self.timesteps)) if self.calls_stand_alone else self.timesteps

    def adds_noise(self) -> bool:
        """Whether its steps draw noise: new schedulers of its kind make two calls' steps from two seeds.

        What is passed to `step` alone, as DDIM's `eta`, can't be seen.
        """
        kind = type(self.scheduler)
        if not self._config or "generator" not in inspect.signature(kind.step).parameters:
            return self._has("noise_sampler")  # the one that draws by a sampler of its own
        made = []
        with torch.device("cpu"):
            still = torch.zeros(1, 1, 2, 2)
            for seed in range(2):
                generator = torch.Generator().manual_seed(seed)
                try:
                    fresh = kind.from_config(self._config)
                    fresh.set_timesteps(8)
                    latents = still
                    for t in fresh.timesteps[4:6]:
                        fresh.scale_model_input(latents, t)
                        latents = fresh.step(still, t, latents, generator=generator, return_dict=False)[0]
                    made.append(latents)
                except (AttributeError, TypeError, ValueError, RuntimeError):
                    return False  # a scheduler that asks for more: there is no word on its noise
        return not torch.equal(*made)

    def coordinate(self, step_index: int) -> float | None:
        """The noise level over which hidden states are extrapolated to a step; None where it isn't known."""
        if self._own is not None and self.scheduler is not None:
            return self._own[step_index]
        return self._training_sigma(step_index) if self.on_training_timesteps else None

    def _training_sigma(self, step_index: int) -> float:
        levels = self._training
        return float(np.interp(self.timesteps[step_index], np.arange(len(levels)), levels))

    def steps(self) -> list[SigmaStep | None]:
        """Each step's noise levels; None where its error can't be made up for.

        That is so where a step is not one call to a lower level, it isn't known what the model predicts, or
        flows are matched: there nothing was gained by it.
        """
        if self.scheduler is None or self.is_flow or not self.calls_stand_alone:
            return [None] * len(self.timesteps)
        if self._own is None:
            if not self.on_training_timesteps:
                return [None] * len(self.timesteps)
            last = float(getattr(self.scheduler, "final_alpha_cumprod", 1.0))
            sigmas = [*map(self._training_sigma, range(len(self.timesteps))), (1 / last - 1) ** 0.5]
            return [self._step(*levels) for levels in pairwise(sigmas)]
        steps = [self._step(*levels) for levels in pairwise(self._own)]
        if self._own[-1] > 0:
            # a last step that is long: multistep samplers extrapolate in it, by unknown weights
            steps[-1] = None
        return steps

    def _step(self, sigma: float, sigma_next: float) -> SigmaStep | None:
        if not 0 <= sigma_next < sigma:
            return None
        c_out = self._c_out(sigma)
        variance = self._config["sigma_data"] ** 2 if self.is_edm else 1.0
        return None if c_out is None else SigmaStep(sigma, sigma_next, c_out, variance)

    def _c_out(self, sigma: float) -> float | None:
        prediction_type = self._config.get("prediction_type")
        if self.is_edm:
            data = self._config["sigma_data"]
            size = sigma * data / (sigma**2 + data**2) ** 0.5
            return {"epsilon": size, "v_prediction": -size}.get(prediction_type)
        velocity = -sigma / (1 + sigma**2) ** 0.5
        known = {"epsilon": -sigma, "sample": 1.0, "original_sample": 1.0, "v_prediction": velocity}
        return known.get(prediction_type)

    def _has(self, name: str) -> bool:
        return hasattr(self.scheduler, name)


def find_scheduler(timesteps: Any, known: Iterable[Any]) -> Any:
    """The scheduler whose list of timesteps this is; None where there is none.

    Args:
        timesteps: the list, a tensor.
        known: schedulers that are looked at first; then all that are alive.
    """
    if not isinstance(timesteps, Tensor):
        return None
    for scheduler in known:
        if holds(scheduler, timesteps):
            return scheduler
    alive = [thing for thing in gc.get_objects() if issubclass(type(thing), SchedulerMixin)]  # some 100 ms
    return next((scheduler for scheduler in alive if holds(scheduler, timesteps)), None)


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
