"""AdamW, plain or with 8-bit moments, and what they take."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from typing import Any

import torch

from .config import DreamBoothConfig

_SMALLEST = 4096  # numbers in a tensor whose moments bitsandbytes keeps in 8 bits


def in_8_bits(config: DreamBoothConfig, device: torch.device) -> bool:
    """Whether moments take 8 bits: as `use_8bit_adam` says, or on CUDA devices.

    Raises:
        ValueError: bitsandbytes is needed, and is not installed or does not run there.
    """
    if config.use_8bit_adam is False or (config.use_8bit_adam is None and device.type != "cuda"):
        return False
    if device.type != "cuda":
        raise ValueError(f"use_8bit_adam needs a CUDA device, this is {device.type}: pass --no_use_8bit_adam")
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ValueError(
            "8-bit AdamW, the default on CUDA devices, needs bitsandbytes: pip install bitsandbytes, or pass "
            "--no_use_8bit_adam, which takes 6 more bytes for each trained weight"
        )
    return True


def make_optimizer(
    config: DreamBoothConfig, parameters: list[torch.nn.Parameter], device: torch.device, processes: int
) -> torch.optim.Optimizer:
    """AdamW with the settings of a run."""
    settings: dict[str, Any] = {
        "lr": config.rate(processes),
        "betas": (config.adam_beta1, config.adam_beta2),
        "weight_decay": config.adam_weight_decay,
        "eps": config.adam_epsilon,
    }
    if in_8_bits(config, device):
        import bitsandbytes

        return bitsandbytes.optim.AdamW8bit(parameters, **settings)
    # By default a step on a GPU makes a copy of all moments at once.
    return torch.optim.AdamW(parameters, **settings, foreach=False)


def moment_bytes(parameters: Iterable[torch.nn.Parameter], eight_bits: bool) -> int:
    """Bytes of the two moments of each parameter."""
    numbers = [p.numel() for p in parameters]
    if not eight_bits:
        return 8 * sum(numbers)
    # A byte each, and for every 256 a factor in float32.
    return sum(2 * (n + -(-n // 256) * 4) if n >= _SMALLEST else 8 * n for n in numbers)
