"""Peak memory of Stable Diffusion 1.5 and XL, counted at real size without allocating it.

Tensors have a shape and a dtype and no numbers. Each storage adds its bytes when it is made, and takes them
away when it is freed. Not counted: what CUDA and its libraries take for themselves, and what the allocator
loses by rounding and fragmentation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import DPMSolverMultistepScheduler, UNet2DConditionModel
from rich.console import Console
from torch import Tensor

from agentsd.dreambooth.counting import Storages, fused_attention

from ..cost.architectures import SD15, SDXL, autoencoder
from ..environment import describe_environment, describe_run
from ..images.methods import Method, parse_method
from ..pages import rows as results
from ..pages.rows import Column, Row, figure
from ..settings import Backend, Settings
from .settings import ComputedSettings

GB = 1e9
STEPS = 9
"""Of a run: enough for each kind of step and for all that is cached."""
CASES: tuple[tuple[str, Mapping[str, Any], int], ...] = (
    ("SD 1.5, 512 px", SD15, 512),
    ("SD 1.5, 768 px", SD15, 768),
    ("SD 1.5, 1024 px", SD15, 1024),
    ("SDXL, 1024 px", SDXL, 1024),
)
"""A name, the U-Net's config, and pixels on a side."""
METHODS: tuple[tuple[str, Backend], ...] = (
    ("baseline", "unfused"),
    ("tomesd", "unfused"),
    ("agentsd", "unfused"),
    ("baseline", "sdpa"),
    ("agentsd", "sdpa"),
    ("fast", "sdpa"),
)
"""What is asked of, and how other attention is computed: as the paper's tables have it, or fused."""
COLUMNS = [
    Column("run", lambda row: row["label"]),
    Column("peak of denoising, 1 image", figure("denoising", ".2f")),
    Column("denoising, GB/img", figure("denoising_per_image", ".2f")),
    Column("decoding, GB/img", figure("decoding_per_image", ".2f")),
    Column("GB/img", figure("memory_per_image", ".2f")),
    Column("cached, GB/img", figure("cached_per_image", ".2f")),
]
NOTE = (
    "In GB (1e9 bytes), computed from shapes and dtypes: nothing was measured on a GPU. Random weights in "
    f"float16, guided, DPM++ 2M, {STEPS} steps; GB/img is the growth of the peak from one image to two. "
    "Peaks of denoising hold the weights of U-Net and autoencoder, not the text encoder's."
)


def command(settings: ComputedSettings, console: Console) -> None:
    """Count each row, print it and write all."""
    run = describe_run(settings, describe_environment(torch.device("cpu")))
    rows = []
    for row in _rows():
        rows.append(row)
        console.print(row["label"])
    results.write_rows(settings.out, "memory", rows, {"memory": COLUMNS}, run, NOTE)
    results.show(console, rows, {"memory": COLUMNS}, NOTE, settings.out)


def _rows() -> Iterator[Row]:
    for case, config, size in CASES:
        for name, backend in METHODS:
            method = parse_method(name, 0.4, Settings(backend=backend))
            one, two = (sampling(method, size, images, config) for images in (1, 2))
            both = [max(run["denoising"], run["decoding"]) for run in (one, two)]
            yield {
                "label": f"{case}, {method.label}" + (", unfused" if backend == "unfused" else ""),
                "denoising": (one["weights"] + one["denoising"]) / GB,
                "memory_per_image": (both[1] - both[0]) / GB,
                **{
                    f"{part}_per_image": (two[part] - one[part]) / GB
                    for part in ("denoising", "decoding", "cached")
                },
            }


def sampling(method: Method, size: int, images: int, config: Mapping[str, Any]) -> dict[str, int]:
    """Return the bytes of a guided run in float16 and of decoding its images, SDXL's in float32.

    Args:
        method: with or without unfused attention.
        size: pixels on a side.
        images: in a batch; the U-Net's is twice as large.
        config: of the U-Net.

    Returns:
        `weights` of U-Net and autoencoder, `denoising` and `decoding` (the peaks above them), and `cached`
        (the most that lived between two steps, the latents among it).
    """
    counted = Storages("meta")
    fused = nullcontext() if method.backend == "unfused" else fused_attention()
    with torch.no_grad(), counted, fused:
        model = in_dtype(lambda: unet(config), torch.float16, "meta")
        vae = in_dtype(autoencoder, torch.float16, "meta")
        weights = counted.live
        live: list[int] = []
        counted.peak = weights
        latents = denoise(method, model, size, images, STEPS, lambda: live.append(counted.live - weights))
        denoising, counted.peak = counted.peak - weights, counted.live
        if config.get("addition_embed_type"):  # diffusers decodes SDXL's latents in float32
            vae, latents = vae.float(), latents.float()
        vae.decode(latents)
    return {
        "weights": weights,
        "denoising": denoising,
        "decoding": counted.peak - weights,
        "cached": max(live),
    }


def unet(config: Mapping[str, Any]) -> Any:
    """Return a U-Net with random weights."""
    model: Any = UNet2DConditionModel(**config)
    return model.eval()


def in_dtype(build: Callable[[], Any], dtype: torch.dtype, device: str) -> Any:
    """Return the model that `build` makes, with weights of that type, on that device."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return build()
    finally:
        torch.set_default_dtype(before)


@dataclass(eq=False)
class Pipe:
    """What methods are applied to: a U-Net whose scheduler is known, so that cached steps are corrected."""

    unet: Any
    scheduler: Any


def denoise(
    method: Method,
    model: Any,
    size: int,
    images: int,
    steps: int,
    after_step: Callable[[], object] = lambda: None,
) -> Tensor:
    """Return the latents of a guided run of DPM++ 2M (Karras) with a method, where `model` lives.

    Args:
        method: applied for the run.
        model: Stable Diffusion's U-Net.
        size: pixels on a side.
        images: in a batch; the U-Net's is twice as large.
        steps: of the sampler.
        after_step: called when a step's own tensors are gone.
    """
    like: dict[str, Any] = {"dtype": model.dtype, "device": model.device}
    latents = torch.zeros(images, 4, size // 8, size // 8, **like)
    text = torch.zeros(2 * images, 77, model.config.cross_attention_dim, **like)
    conditions: dict[str, Any] = {}
    if model.config.addition_embed_type == "text_time":  # SDXL
        widths = {"text_embeds": 1280, "time_ids": 6}
        conditions = {name: torch.zeros(2 * images, width, **like) for name, width in widths.items()}
    scheduler: Any = DPMSolverMultistepScheduler(use_karras_sigmas=True)
    scheduler.set_timesteps(steps)
    pipe = Pipe(model, scheduler)
    with torch.no_grad(), method.applied(pipe):
        for t in scheduler.timesteps:
            unconditional, conditional = model(
                torch.cat([latents] * 2), t, text, added_cond_kwargs=conditions
            ).sample.chunk(2)
            guided = unconditional + 7.5 * (conditional - unconditional)
            latents = scheduler.step(guided, t, latents).prev_sample
            del unconditional, conditional, guided
            after_step()
    return latents
