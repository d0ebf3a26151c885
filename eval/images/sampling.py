"""One batch of images, from noise that belongs to each image alone."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from PIL import Image

from agentsd.apply import handle_of

from ..errors import EvalError
from ..log import captured
from ..settings import SamplingSettings
from .methods import Method
from .prompts import ImageSpec


@dataclass(frozen=True)
class Seconds:
    """Wall-clock and processor seconds of one measured stretch."""

    wall: float
    cpu: float

    def charged(self, device: torch.device) -> float:
        """Return what speed-ups are computed from: wall time on a GPU, processor time on a CPU.

        Processor time is what a busy machine disturbs least.
        """
        return self.cpu if device.type == "cpu" else self.wall


class Stopwatch:
    """Measures a `with` block, after the device has finished what came before and inside."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.seconds = Seconds(0.0, 0.0)

    def _now(self) -> tuple[float, float]:
        if self._device.type not in ("cpu", "meta"):
            torch.accelerator.synchronize(self._device)
        return time.perf_counter(), time.process_time()

    def __enter__(self) -> "Stopwatch":
        self._start = self._now()
        return self

    def __exit__(self, *exception: object) -> None:
        wall, cpu = self._now()
        self.seconds = Seconds(wall - self._start[0], cpu - self._start[1])


def size_of(pipe: Any, settings: SamplingSettings) -> tuple[int, int]:
    """Return (height, width) in pixels: the settings' own, else the model's."""
    native = pipe.unet.config.sample_size * pipe.vae_scale_factor
    return settings.height or native, settings.width or native


def initial_latents(pipe: Any, rngs: Sequence[torch.Generator], height: int, width: int) -> torch.Tensor:
    """Return standard normal noise (len(rngs), C, h, w), float32 on the CPU, of a generator each."""
    factor = pipe.vae_scale_factor
    shape = (pipe.unet.config.in_channels, height // factor, width // factor)
    return torch.stack([torch.randn(shape, generator=rng, device="cpu") for rng in rngs])


def warm_up(pipe: Any, method: Method, specs: Sequence[ImageSpec], settings: SamplingSettings) -> None:
    """Make a batch in six steps at most, whose time would hold what is done only once.

    In so many a recipe computes steps and passes over others, each kind for the first time.
    """
    few = replace(method, steps=min(method.steps or settings.steps, 6))
    with captured():  # what is said of so short a run means nothing
        sample(pipe, few, specs, settings)


def sample(
    pipe: Any,
    method: Method,
    specs: Sequence[ImageSpec],
    settings: SamplingSettings,
    summarise: Callable[[str], Any] = lambda summary: None,
) -> tuple[list[Image.Image], Seconds]:
    """Return one image for each of `specs`, made as one batch under `method`, and the time it took.

    The time is that of the pipeline's call (text encoder, denoising, decoder), not of patching. An image's
    noise depends on its seed alone; tomesd's random cells also on the batch's first seed. `summarise` is
    called with what each call of the run was, where a recipe is in force.
    """
    height, width = size_of(pipe, settings)
    seeds = [spec.seed for spec in specs]
    device, dtype = pipe._execution_device, pipe.unet.dtype  # weights may be offloaded
    # Samplers that add noise at each step go on with the stream that the initial noise was drawn from.
    generators = [torch.Generator("cpu").manual_seed(seed) for seed in seeds]
    latents = initial_latents(pipe, generators, height, width).to(device, dtype)
    with method.applied(pipe, seeds[0]):
        with Stopwatch(device) as watch:
            output = pipe(
                prompt=[spec.prompt for spec in specs],
                height=height,
                width=width,
                num_inference_steps=method.steps or settings.steps,
                guidance_scale=settings.guidance_scale,
                latents=latents,
                generator=generators,
            )
        if handle := handle_of(pipe):
            summarise(handle.summary())
    for spec, image in zip(specs, output.images, strict=True):
        if all(low == high for low, high in image.convert("RGB").getextrema()):
            raise EvalError(
                f"{method.label}, seed {spec.seed}: the image is of one colour: its latents are no numbers; "
                "try --dtype float32, or another guidance or sampler"
            )
    return output.images, watch.seconds
