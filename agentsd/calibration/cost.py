"""What a call costs: exact counts of its MACs, or seconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from ..hosts.models import is_quantized

Cost = Literal["macs", "seconds"]


def cost_of(cost: Cost, device: torch.device, run: Callable[[], Any]) -> float:
    """MACs of one call of `run`, or its CPU seconds; on a GPU seconds, when it has finished."""
    if cost == "macs":
        return macs(run)
    start = _now(device)
    run()
    return _now(device) - start


def _now(device: torch.device) -> float:
    if device.type != "cuda":
        return time.process_time()
    torch.cuda.synchronize(device)
    return time.perf_counter()


def macs(run: Callable[[], Any]) -> int:
    """MACs of the matrix products, convolutions and attention in one call of `run`.

    Only eager code is seen; fused attention on a CPU and quantised linear layers are counted as well.
    """
    cpu_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    with (
        FlopCounterMode(display=False, custom_mapping={cpu_attention: _cpu_attention_flop}) as counter,
        _Quantized(counter) as quantized,
    ):
        run()
    return counter.get_total_flops() // 2 + quantized.unseen


class _Quantized:
    """Counts what torch's counter does not: products of quantised layers in operations of their own.

    Attributes:
        unseen: MACs that the counter missed.
    """

    def __init__(self, counter: FlopCounterMode) -> None:
        self.unseen = 0
        self._counter, self._before, self._hooks = counter, 0, ExitStack()

    def __enter__(self) -> _Quantized:
        for handle in (
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave),
        ):
            self._hooks.callback(handle.remove)
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.close()

    def _enter(self, module: Module, args: Any) -> None:
        if _is_quantized_linear(module):
            self._before = self._counter.get_total_flops()

    def _leave(self, module: Module, args: Any, output: Any) -> None:
        if _is_quantized_linear(module):
            seen = self._counter.get_total_flops() - self._before
            self.unseen += output.numel() * module.in_features - seen // 2


def _is_quantized_linear(module: Any) -> bool:
    """Whether it is one; a LoRA around it is not."""
    if not hasattr(module, "in_features") or next(module.children(), None) is not None:
        return False
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and is_quantized(weight)


def _cpu_attention_flop(
    query: torch.Size, key: torch.Size, value: torch.Size, *args: Any, out_val: Any = None, **kwargs: Any
) -> int:
    return sdpa_flop_count(query, key, value)
