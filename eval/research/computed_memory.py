"""Peak memory of Stable Diffusion 1.5 and XL, counted at real size without allocating it.

Each storage adds its bytes when it is made, and takes them away when it is freed. Not counted: what CUDA and
its libraries take for themselves, and what the allocator loses by rounding and fragmentation.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from diffusers import DDPMScheduler
from rich.console import Console
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from transformers import CLIPTextConfig, CLIPTextModel

from agentsd import Agents, apply_agentsd
from agentsd.dreambooth.config import DreamBoothConfig
from agentsd.dreambooth.step import diffusion_loss

from ..cost.architectures import SD15, SDXL, autoencoder
from ..environment import describe_run
from ..images.methods import Method, parse_method
from ..pages import rows as results
from ..pages.rows import Column, Row, figure
from ..settings import Settings
from .settings import ComputedSettings
from .shapes import METHODS, FusedAttention, denoise, in_dtype, unet

GB = 1e9
STEPS = 9
"""Of a run: enough for each kind of step and for all that is cached."""
TEXT: dict[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
}
TRAINING = (
    (None, False, True),
    (0.0, False, True),
    (0.4, False, True),
    (0.4, True, True),
    (0.4, False, False),
)
"""Ratio (None: the baseline's attention), prior preservation, and checkpointing of gradients."""
COLUMNS = [
    Column("run", lambda row: row["label"]),
    Column("peak of denoising, 1 image", figure("denoising", ".2f")),
    Column("denoising, GB/img", figure("denoising_per_image", ".2f")),
    Column("decoding, GB/img", figure("decoding_per_image", ".2f")),
    Column("GB/img", figure("memory_per_image", ".2f")),
    Column("cached, GB/img", figure("cached_per_image", ".2f")),
]
PARTS = ("frozen", "weights", "gradients", "optimizer", "activations", "peak")
TRAINING_COLUMNS = [
    Column("training", lambda row: row["label"]),
    *(Column(p, figure(p, ".2f")) for p in PARTS),
]
NOTE = (
    "In GB (1e9 bytes), computed from shapes and dtypes: nothing was measured on a GPU. {} in float16, "
    f"guided, DPM++ 2M, {STEPS} steps; GB/img is the growth of the peak from one image to two. Peaks of "
    "denoising hold the weights of U-Net and autoencoder, not the text encoder's."
)
TRAINING_NOTE = (
    " Training: DreamBooth at "
    "batch 1 and 512 px, half precision over float32 weights, 8-bit AdamW (two bytes a number); activations "
    "are the rest at the peak."
)
ARCHITECTURES: dict[str, tuple[str, dict[str, Any], tuple[tuple[float | None, bool, bool], ...]]] = {
    "sd15": ("SD 1.5", SD15, TRAINING),
    "sdxl": ("SDXL", SDXL, ()),
}
"""A name, the U-Net's config, and what is trained."""


def command(settings: ComputedSettings, console: Console) -> None:
    """Count each row, print it and write all."""
    run = describe_run(settings, torch.device("cpu"))
    name, config, trained = ARCHITECTURES[settings.arch]
    rows = []
    for row in _rows(config, settings.sizes, trained):
        rows.append(row)
        console.print(row["label"])
    tables = [COLUMNS, TRAINING_COLUMNS] if trained else [COLUMNS]
    note = NOTE.format(name) + (TRAINING_NOTE if trained else "")
    results.write_rows(settings.out, "memory", rows, tables, run, note)
    for columns in tables:
        console.print(results.to_terminal("memory", rows, columns))
    console.print(note)
    console.print(f"figures: {settings.out}", soft_wrap=True)


def _rows(
    config: Mapping[str, Any], sizes: tuple[int, ...], trained: tuple[tuple[float | None, bool, bool], ...]
) -> Iterator[Row]:
    for size in sizes:
        for name, backend in METHODS:
            method = parse_method(name, 0.4, Settings(), backend)
            if method.steps is not None:
                continue  # fewer steps take as much
            one, two = (sampling(method, size, images, config) for images in (1, 2))
            both = [max(run["denoising"], run["decoding"]) for run in (one, two)]
            yield {
                "label": f"{size} px, {method.label}" + (", unfused" if backend == "unfused" else ""),
                "denoising": (one["weights"] + one["denoising"]) / GB,
                "memory_per_image": (both[1] - both[0]) / GB,
                **{
                    f"{part}_per_image": (two[part] - one[part]) / GB
                    for part in ("denoising", "decoding", "cached")
                },
            }
    for ratio, prior, checkpointing in trained:
        label = "the baseline's attention" if ratio is None else f"ratio {ratio:g}"
        label += ", prior preservation" if prior else ""
        label += "" if checkpointing else ", no gradient checkpointing"
        parts = training(ratio, prior, checkpointing)
        yield {"label": label} | {part: size / GB for part, size in parts.items()}


class Storages(TorchDispatchMode):
    """Counts the bytes of storages that live on a device.

    Attributes:
        live: bytes now.
        peak: the most bytes that lived at once; may be set.
    """

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device, self.live, self.peak = device, 0, 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs or {})
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.device.type == self.device:
                self._note(tensor.untyped_storage())
        return out

    def _note(self, storage: Any) -> None:
        if id(storage) in self._known:
            return
        self._known.add(id(storage))
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._free, id(storage), storage.nbytes())

    def _free(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


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
    fused = nullcontext() if method.backend == "unfused" else FusedAttention()
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


def training(ratio: float | None, prior: bool, checkpointing: bool = True) -> dict[str, float]:
    """Return the bytes of a step of DreamBooth at batch 1 and 512 px, half precision over float32 weights.

    Args:
        ratio: of agent attention as `agentsd-dreambooth` trains with it; None for the baseline's attention.
        prior: with an image of the class beside the subject's.
        checkpointing: of gradients.

    Returns:
        `frozen` (autoencoder and text encoder), `weights`, `gradients`, `optimizer` (8-bit AdamW: two
        states of a byte a number), `activations` (the rest at the peak) and `peak`.
    """
    counted, half = Storages("cpu"), torch.bfloat16  # as many bytes as float16, and a CPU has its kernels
    images = 2 if prior else 1
    with FakeTensorMode(allow_non_fake_inputs=True), counted, _destinations_are_real():
        vae = in_dtype(autoencoder, half).requires_grad_(False)
        text_encoder = in_dtype(lambda: CLIPTextModel(CLIPTextConfig(**TEXT)), half).requires_grad_(False)
        frozen = counted.live
        model = unet().train()
        weights = counted.live - frozen
        if checkpointing:
            model.enable_gradient_checkpointing()
        if ratio is not None:
            named = dict.fromkeys(
                ("pretrained_model_name_or_path", "instance_data_dir", "instance_prompt"), ""
            )
            config = DreamBoothConfig.model_validate(named | {"ratio": ratio})
            apply_agentsd(model, recipe=config.recipe)
        batch: Any = SimpleNamespace(
            pixels=torch.zeros(images, 3, 512, 512),
            input_ids=torch.zeros(images, 77, dtype=torch.long),
            generator=None,
        )
        counted.peak = counted.live
        with torch.autocast("cpu", half):
            loss = diffusion_loss(
                vae,
                text_encoder,
                lambda noisy, _, text: model(noisy, 500.0, text),  # a drawn timestep could not be read
                DDPMScheduler(),
                batch,
                1.0 if prior else None,
            )
        loss.backward()
        gradients = sum(p.grad.nbytes for p in model.parameters())
    optimizer = 2 * sum(p.numel() for p in model.parameters())
    return {
        "frozen": frozen,
        "weights": weights,
        "gradients": gradients,
        "optimizer": optimizer,
        "activations": counted.peak - frozen - weights - gradients,
        "peak": counted.peak + optimizer,
    }


@contextmanager
def _destinations_are_real() -> Iterator[None]:
    """Destination tokens are drawn with numbers, also while no other tensor has any."""
    drawn = Agents.sample_partition

    def sample_partition(*args: Any) -> Any:
        with _disable_current_modes():
            return drawn(*args)

    with patch.object(Agents, "sample_partition", sample_partition):
        yield
