"""Seconds of a DreamBooth batch on the toy model, without agents and with, fused and unfused, in turns."""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from agentsd import apply_agentsd
from agentsd.dreambooth.config import DreamBoothConfig

ROUNDS = 7
KERNELS = {"fused": SDPBackend.FLASH_ATTENTION, "unfused": SDPBackend.MATH}


def unet_with(ratio: float | None) -> Any:
    """The toy model's U-Net in training, with agents as DreamBooth trains, or None of them."""
    from agentsd.demo import load_pipeline  # a package of its own

    pipe: Any = load_pipeline()
    unet = pipe.unet.train()
    if ratio is not None:
        own = {"pretrained_model_name_or_path": "demo", "instance_data_dir": "i", "instance_prompt": "i"}
        apply_agentsd(unet, recipe=DreamBoothConfig.model_validate(own | {"ratio": ratio}).recipe)
    return unet


def main(side: int) -> None:
    """Print the median seconds of forward and backward at latents of `side`, and their ratio to no agents."""
    unets = {"no agents": unet_with(None), "ratio 0": unet_with(0.0), "ratio 0.4": unet_with(0.4)}
    width = unets["no agents"].config
    latents = torch.randn(1, width.in_channels, side, side, generator=torch.Generator().manual_seed(0))
    text = torch.zeros(1, 77, width.cross_attention_dim)
    seconds: dict[tuple[str, str], list[float]] = {}
    for turn in range(ROUNDS + 1):
        for kind, kernel in KERNELS.items():
            for name, unet in unets.items():
                began = time.perf_counter()
                with sdpa_kernel(kernel):
                    unet(latents, 500, text).sample.square().mean().backward()
                if turn:  # the first warms up
                    seconds.setdefault((kind, name), []).append(time.perf_counter() - began)
    for (kind, name), found in seconds.items():
        middle = statistics.median(found)
        share = statistics.median(a / b for a, b in zip(found, seconds[kind, "no agents"], strict=True))
        print(f"| {side}x{side} latents, {kind} | {name} | {middle:.3f} s | {share:.2f} |", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
