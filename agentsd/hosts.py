"""What the patch must know of a model it did not make: where its self-attention layers and levels are."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from diffusers.models.attention import BasicTransformerBlock
from diffusers.models.attention_processor import Attention
from diffusers.utils.torch_utils import unwrap_module
from torch.nn import Module

# Processors that compute softmax attention and nothing else, so that agent attention may stand in for them.
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


@dataclass(frozen=True)
class Site:
    """One self-attention layer of a U-Net: its name, its block, and how often the latent is halved there."""

    name: str
    block: BasicTransformerBlock
    level: int

    @property
    def attn(self) -> Attention:
        """The layer itself."""
        return self.block.attn1


def find_unet(pipe: Any) -> Any:
    """The U-Net of a pipeline, or `pipe` itself when it is one; unwrapped if it is compiled.

    Raises:
        TypeError: there is none.
    """
    unet = pipe if isinstance(pipe, Module) else getattr(pipe, "unet", None)
    if isinstance(unet, Module):
        unet = unwrap_module(unet)
        if hasattr(unet, "down_blocks"):
            return unet
    raise TypeError(
        f"{type(pipe).__name__} has no U-Net: pass a diffusers pipeline with a `unet`, or the U-Net itself"
    )


def find_sites(unet: Any, levels: int) -> list[Site]:
    """The spatial self-attention layers on the `levels` finest attention levels, in the model's order.

    Levels are counted from the finest one that has self-attention (level 0 in SD 1.x, 1 in SDXL).

    Raises:
        ValueError: the model has no such layer, or fewer levels.
    """
    depth = len(unet.down_blocks)
    sites = []
    for name, block in unet.named_modules():
        place = re.match(r"(down_blocks|up_blocks|mid_block)\.(\d*)", name)
        if not isinstance(block, BasicTransformerBlock) or place is None or "motion_modules" in name:
            continue
        if block.only_cross_attention:
            continue
        part, number = place.groups()
        level = {"down_blocks": int(number or 0), "up_blocks": depth - 1 - int(number or 0)}.get(
            part, depth - 1
        )
        sites.append(Site(f"{name}.attn1", block, level))
    found = sorted({site.level for site in sites})
    if not found:
        raise ValueError(
            f"{type(unet).__name__} has no self-attention that agentsd could patch; nothing was changed"
        )
    if levels > len(found):
        raise ValueError(
            f"levels={levels}: {type(unet).__name__} has attention on {len(found)} levels; pass at most that"
        )
    return [site for site in sites if site.level in found[:levels]]


def is_plain(processor: Any) -> bool:
    """Whether agent attention may take the place of this processor."""
    return type(processor).__name__ in PLAIN_PROCESSORS


def is_tomesd_block(block: Module) -> bool:
    """Whether the tomesd package has patched this block."""
    return type(block).__name__ == "ToMeBlock"
