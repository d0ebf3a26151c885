"""What the patch needs to know about the host model: attention layers, token grids, arguments."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from diffusers.models.attention import BasicTransformerBlock
from diffusers.models.attention_processor import Attention
from torch import Tensor
from torch.nn import DataParallel, Module
from torch.nn.parallel import DistributedDataParallel

# Processors that compute softmax attention and nothing else, so agent attention may replace them.
PLAIN_PROCESSORS = frozenset(
    {
        "AttnProcessor",
        "AttnProcessor2_0",
        "AttnProcessorNPU",
        "FusedAttnProcessor2_0",
        "SlicedAttnProcessor",
        "XFormersAttnProcessor",
        "XLAFlashAttnProcessor2_0",
    }
)

MID_RESIDUAL = "mid_block_additional_residual"
DOWN_RESIDUALS = "down_block_additional_residuals"
ADAPTER_RESIDUALS = "down_intrablock_additional_residuals"
RESIDUALS = (MID_RESIDUAL, DOWN_RESIDUALS, ADAPTER_RESIDUALS)
"""The arguments that a ControlNet or a T2I-Adapter computes for each call."""

_TEMPORAL = re.compile(r"motion_modules|temp_attentions|transformer_in|temporal_transformer_blocks")

EVERY_LEVEL = 99
"""More attention levels than any model has."""


@dataclass(frozen=True)
class AttentionLayer:
    """One self-attention layer: its name, its block, and how many latent pixels a token is wide."""

    name: str
    block: BasicTransformerBlock
    downsampling_factor: int

    @property
    def attn(self) -> Attention:
        """The layer itself."""
        return self.block.attn1

    def grid(self, latent: Tensor) -> tuple[int, int]:
        """Return height and width in tokens for a latent (..., H, W), rounded up."""
        height, width = (-(-size // self.downsampling_factor) for size in latent.shape[-2:])
        return height, width


def find_model(pipe: Any) -> Any:
    """Return a pipeline's denoiser (its `unet`, or a `transformer` like DiT's), or `pipe` if it is one.

    Wrappers by `torch.compile`, PEFT's `get_peft_model` and DistributedDataParallel are looked through.

    Raises:
        TypeError: there is none, or copies of it would run side by side (DataParallel on several devices).
    """
    candidates = (
        [pipe]
        if isinstance(pipe, Module)
        else [getattr(pipe, "unet", None), getattr(pipe, "transformer", None)]
    )
    for model in candidates:
        if isinstance(model, Module):
            model = unwrap(model)
            if hasattr(model, "down_blocks") or hasattr(model, "transformer_blocks"):
                return model
    raise TypeError(
        f"{type(pipe).__name__} has no U-Net: pass a diffusers pipeline with a `unet`, or the U-Net itself"
    )


def unwrap(model: Module) -> Module:
    """Return the model inside its wrappers."""
    while True:
        if isinstance(model, DataParallel) and len(model.device_ids) > 1:
            raise TypeError(
                f"DataParallel on devices {model.device_ids} runs copies of the model side by side, which "
                "can't share a patch: use DistributedDataParallel, one process a device"
            )
        inner: Any = vars(model)["_modules"].get("_orig_mod")  # of torch.compile
        if isinstance(model, DataParallel | DistributedDataParallel):
            inner = model.module
        elif inner is None and callable(base := getattr(type(model), "get_base_model", None)):  # of PEFT
            inner = base(model)
        if inner is None:
            return model
        model = inner


def find_attention_layers(model: Any, levels: int, at_most: bool = False) -> list[AttentionLayer]:
    """Return the spatial self-attention layers of the finest `levels` resolution levels, in order.

    Levels are counted from the finest one that has self-attention: the latent's own resolution in SD 1.x,
    half of it in SDXL. A DiT has one level, its patches.

    Raises:
        ValueError: the model has no such layer, or fewer levels (unless `at_most`).
    """
    layers = []
    for name, block in model.named_modules():
        factor = _downsampling_factor(name, model)
        if isinstance(block, BasicTransformerBlock) and factor and not block.only_cross_attention:
            layers.append(AttentionLayer(f"{name}.attn1", block, factor))
    found = sorted({layer.downsampling_factor for layer in layers})
    kind = type(model).__name__
    if not found:
        raise ValueError(f"{kind} has no self-attention that agentsd could patch; nothing was changed")
    if levels > len(found) and not at_most:
        raise ValueError(f"levels={levels}: {kind} has attention on {len(found)} levels; pass at most that")
    return [layer for layer in layers if layer.downsampling_factor in found[:levels]]


def _downsampling_factor(name: str, model: Any) -> int:
    """Return how many latent pixels a token is wide in this block; 0 if its tokens aren't of one image."""
    if _TEMPORAL.search(name):
        return 0
    if name.startswith("transformer_blocks."):
        return int(getattr(model.config, "patch_size", 0))  # a prior has no image tokens
    place = re.match(r"(down_blocks|up_blocks|mid_block)\.(\d*)", name)
    if place is None:
        return 0
    deepest = len(model.down_blocks) - 1
    part, number = place.groups()
    return 2 ** {"down_blocks": int(number or 0), "up_blocks": deepest - int(number or 0)}.get(part, deepest)


def frames_of(config: Any, latent: Tensor) -> int:
    """Return the frames of a video latent, (B, C, F, H, W) or (B, F, C, H, W) in SVD; 1 for an image."""
    if latent.ndim != 5:
        return 1
    return latent.shape[1 if getattr(config, "num_frames", None) else 2]


def read_call(
    model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[dict[str, Any], Tensor, Any]:
    """Return a forward call's arguments by name (positional ones first), its latent, and its timestep.

    Raises:
        ValueError: an argument is missing, or the model is being traced.
    """
    if torch.jit.is_tracing():
        raise ValueError(
            "the U-Net is being traced; the trace is the model's own, as no patch comes out of it again"
        )
    names = _parameters(model.__class__)
    given = dict(zip(names, args, strict=False)) | kwargs
    try:
        return given, given[names[0]], given["timestep"]
    except (KeyError, IndexError) as error:
        raise ValueError(
            f"a call of the {type(model).__name__} has no argument {error}, so it is left as it "
            "is; name latents and timestep as diffusers' forward does"
        ) from None


def regroup(given: dict[str, Any], positional: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Undo `read_call`: return args and kwargs, the first `positional` of them as args."""
    names, values = list(given), tuple(given.values())
    return values[:positional], dict(zip(names[positional:], values[positional:], strict=True))


def takes(model: Any, argument: str) -> bool:
    """Return whether a model's forward has this argument."""
    return argument in _parameters(model.__class__)


@lru_cache(maxsize=64)
def _parameters(kind: Any) -> list[str]:
    """Return the names of forward's parameters; for `*args, **kwargs`, those of the base class's forward."""
    forwards = [vars(base)["forward"] for base in kind.__mro__ if "forward" in vars(base)]
    names = [list(inspect.signature(forward).parameters)[1:] for forward in forwards]
    return next((found for found in names if "timestep" in found), names[0])


def remove_hooks(module: Module, *functions: Any) -> None:
    """Remove these functions from a module's hooks. No handle is needed: an interruption may lose it."""
    hooks = (module._forward_hooks, module._forward_pre_hooks)
    ours = [number for held in hooks for number, hook in held.items() if hook in functions]
    marks = (module._forward_hooks_with_kwargs, module._forward_pre_hooks_with_kwargs)
    for held in (*hooks, *marks, module._forward_hooks_always_called):
        for number in ours:
            held.pop(number, None)


def is_plain(processor: Any) -> bool:
    """Return whether agent attention may replace this processor.

    IP-Adapter's own package uses the same names for modules. Those with weights are not plain.
    """
    has_weights = isinstance(processor, Module) and bool([*processor.parameters(), *processor.buffers()])
    return type(processor).__name__ in PLAIN_PROCESSORS and not has_weights
