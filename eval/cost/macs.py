"""What a call costs: exact counts of its MACs, or seconds."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

Cost = Literal["macs", "seconds"]


def cost_of(cost: Cost, device: torch.device, run: Callable[[], Any]) -> float:
    """MACs of one call of `run`, or its CPU seconds; on a GPU seconds, when it has finished."""
    if cost == "macs":
        return macs(run)
    start = _now(device)
    run()
    return _now(device) - start


def _now(device: torch.device) -> float:
    if device.type == "cpu":
        return time.process_time()
    torch.accelerator.synchronize(device)
    return time.perf_counter()


def name_of_device(device: torch.device) -> str:
    """What seconds depend on: the GPU's name, or the CPU's kind and how many threads are used."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type}, {platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"


def macs(run: Callable[[], Any]) -> int:
    """MACs of the matrix products, convolutions and attention in one call of `run`.

    Only eager code is seen, and no quantised layer; fused attention on a CPU is counted as well.
    """
    cpu_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    with FlopCounterMode(display=False, custom_mapping={cpu_attention: _cpu_attention_flop}) as counter:
        run()
    return counter.get_total_flops() // 2


def _cpu_attention_flop(
    query: torch.Size, key: torch.Size, value: torch.Size, *args: Any, out_val: Any = None, **kwargs: Any
) -> int:
    return sdpa_flop_count(query, key, value)
