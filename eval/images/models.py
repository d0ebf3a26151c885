"""Load the pipeline that a command measures."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import safetensors
import torch
from diffusers import (
    AutoPipelineForText2Image,
    DDIMScheduler,
    DDPMScheduler,
    DEISMultistepScheduler,
    DPMSolverMultistepScheduler,
    EulerDiscreteScheduler,
    PNDMScheduler,
    SASolverScheduler,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    UniPCMultistepScheduler,
)
from diffusers.loaders.single_file_utils import SingleFileComponentError

from agentsd.dreambooth.pretrained import load_pretrained

from ..errors import EvalError
from ..settings import RunSettings, Settings, is_single_file

_KARRAS = {"use_karras_sigmas": True}
_DPM = {"algorithm_type": "dpmsolver++", "solver_order": 2}
_SA = {"algorithm_type": "data_prediction", "tau_func": lambda timestep: 0}
# Each names all that it goes by: what it leaves out is the other scheduler's whose noise schedule it takes.
_SCHEDULERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "plms": (PNDMScheduler, {"skip_prk_steps": True}),
    "ddim": (DDIMScheduler, {"clip_sample": False}),
    "ddpm": (DDPMScheduler, {"clip_sample": False}),
    "euler": (EulerDiscreteScheduler, {"use_karras_sigmas": False}),
    "dpm++": (DPMSolverMultistepScheduler, {**_DPM, "use_karras_sigmas": False}),
    "dpm++karras": (DPMSolverMultistepScheduler, _DPM | _KARRAS),
    "dpm++3karras": (DPMSolverMultistepScheduler, _DPM | _KARRAS | {"solver_order": 3}),
    "unipckarras": (UniPCMultistepScheduler, {"solver_order": 2} | _KARRAS),
    "deiskarras": (DEISMultistepScheduler, {"algorithm_type": "deis", "solver_order": 2} | _KARRAS),
    "sasolverkarras": (SASolverScheduler, _SA | _KARRAS),
}
"""Those with a number in their name are of that order; SA-Solver is without its noise (tau = 0)."""
_PREDICTIONS: dict[Any, tuple[str, ...]] = {
    None: ("epsilon", "v_prediction", "sample"),
    PNDMScheduler: ("epsilon", "v_prediction"),
}
"""What samplers take a model's output for; that of None is usual."""


def find_device(name: str | None) -> torch.device:
    """Return the device of that name, or without one the first CUDA device, or the CPU."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise EvalError(f"device {name!r} was asked for, but torch finds no CUDA device; use cpu")
    return device


def load_pipeline(settings: Settings) -> Any:
    """Return the pipeline of `settings.model` on its device, with its scheduler, quiet and unchecked.

    The safety checker is left out: it would replace images by black ones. Raises EvalError if the
    model can't be loaded or is none of the kind that the methods patch.
    """
    device = find_device(settings.device)
    dtype = getattr(torch, settings.dtype)
    if settings.model == "demo":
        from agentsd_demo import load_pipeline as load_demo

        try:
            pipe: Any = load_demo(dtype=dtype, device=device)
        except FileNotFoundError as error:
            raise EvalError(str(error)) from error
    else:
        try:
            if is_single_file(settings.model):
                pipe = _from_single_file(settings.model, dtype)
            else:
                pipe = load_pretrained(AutoPipelineForText2Image, settings.model, dtype)
        except (OSError, ValueError, safetensors.SafetensorError, SingleFileComponentError) as error:
            raise EvalError(
                f"can't load the model {settings.model!r}: {' '.join(str(error).split())}; give 'demo', a "
                "diffusers pipeline's folder, a .safetensors file, or a hub id that can be reached"
            ) from error
        if not getattr(settings, "offload", None):
            pipe.to(device)
    if not hasattr(pipe, "unet"):
        raise EvalError(
            f"{settings.model!r} is a {type(pipe).__name__} without a U-Net; use SD 1.x, 2.x or SDXL"
        )
    pipe.scheduler = scheduler_like(pipe.scheduler, settings.scheduler)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _from_single_file(path: str, dtype: torch.dtype) -> Any:
    """Return the pipeline of a file of all weights; its kind's settings and tokenizer are the hub's."""
    with safetensors.safe_open(path, framework="pt") as file:
        parts = {name.partition(".")[0] for name in file.keys()}  # noqa: SIM118  (it is no mapping)
    if not {"first_stage_model", "model"} < parts or not (
        text := parts & {"cond_stage_model", "conditioner"}
    ):
        raise ValueError("it holds no whole model: it may be a LoRA, a VAE or a U-Net alone")
    kind: Any = StableDiffusionXLPipeline if "conditioner" in text else StableDiffusionPipeline
    return kind.from_single_file(path, torch_dtype=dtype)


def offload(pipe: Any, settings: RunSettings) -> None:
    """Keep a pipeline's parts out of GPU memory while they don't run, if the settings say so."""
    device = find_device(settings.device)
    if settings.offload and device.type == "cpu":
        raise EvalError(f"--offload = {settings.offload}: it takes a GPU, and --device is cpu; leave it out")
    if settings.offload == "model":
        pipe.enable_model_cpu_offload(device=device)
    elif settings.offload:
        pipe.enable_sequential_cpu_offload(device=device)


def scheduler_like(scheduler: Any, name: str) -> Any:
    """Return a sampler by its name, on the noise schedule of another; "model" is that one itself.

    Raises EvalError where it can't be on that schedule, or takes no such prediction as the model makes.
    """
    if name == "model":
        return scheduler
    kind, options = _SCHEDULERS[name]
    config, prediction = scheduler.config, scheduler.config.get("prediction_type", "epsilon")
    # Flows have another schedule; levels beyond it or between its timesteps are not on it.
    own_levels = [config.get(key) for key in ("use_flow_sigmas", "sigma_min", "sigma_max")]
    own_levels.append(config.get("timestep_type", "discrete") != "discrete")
    # Of levels up to zero SNR, Karras' are several to a timestep, and diffusers begins at the second of them.
    own_levels.append(config.get("rescale_betas_zero_snr") and options.get("use_karras_sigmas"))
    if not any(own_levels) and prediction in _PREDICTIONS.get(kind, _PREDICTIONS[None]):
        found = kind.from_config(config, **options)
        ours, theirs = (getattr(one, "alphas_cumprod", torch.empty(0)).double() for one in (scheduler, found))
        if ours.shape == theirs.shape and torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6):
            return found
    raise EvalError(
        f"scheduler {name}: {kind.__name__} can't take over the noise levels and the {prediction} of the "
        f"model's {type(scheduler).__name__}; use --scheduler model --samplers none, and no NAME/SAMPLER"
    )


@contextmanager
def sampler(pipe: Any, name: str) -> Iterator[None]:
    """Let a pipeline have another sampler on the same noise schedule."""
    before = pipe.scheduler
    pipe.scheduler = scheduler_like(before, name)
    try:
        yield
    finally:
        pipe.scheduler = before
