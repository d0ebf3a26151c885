"""Exact counts of what a call multiplies and adds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count


def macs(run: Callable[[], Any]) -> int:
    """MACs of the matrix products, convolutions and attention in one call of `run`.

    Only eager code is seen, and no quantised layer; fused attention on a CPU is counted as well.
    """
    with counter() as counts:
        run()
    return counts.get_total_flops() // 2


def counter() -> FlopCounterMode:
    """Return a mode that counts FLOPs, twice the MACs."""
    cpu_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return FlopCounterMode(display=False, custom_mapping={cpu_attention: _cpu_attention_flop})


def _cpu_attention_flop(
    query: torch.Size, key: torch.Size, value: torch.Size, *args: Any, out_val: Any = None, **kwargs: Any
) -> int:
    return sdpa_flop_count(query, key, value)
