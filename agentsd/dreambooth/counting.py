"""What a model's step would take of a GPU's memory, counted on tensors that have a shape and no numbers."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import Conv2d, GroupNorm, LayerNorm, Linear
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..attention import formula
from ..modules import agent

FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


class Storages(TorchDispatchMode):
    """Counts the bytes of storages that live on a device.

    Attributes:
        live: bytes now.
        peak: the most bytes that lived at once; both may be set.
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


def compute_in(dtype: torch.dtype, model: Any) -> None:
    """Let a model's layers compute as under CUDA's autocast, which such tensors do not know."""
    for layer in model.modules():
        if isinstance(layer, (Linear, Conv2d)):
            layer.forward = _in_half(layer, dtype)  # type: ignore[method-assign]
        elif isinstance(layer, (GroupNorm, LayerNorm)):
            layer.float().register_forward_pre_hook(lambda _, args: (args[0].float(),))


def _in_half(layer: Any, dtype: torch.dtype) -> Any:
    def forward(x: Tensor) -> Tensor:
        weight, bias = layer.weight.to(dtype), None if layer.bias is None else layer.bias.to(dtype)
        if isinstance(layer, Conv2d):
            return layer._conv_forward(x.to(dtype), weight, bias)
        return torch.nn.functional.linear(x.to(dtype), weight, bias)

    return forward


@contextmanager
def fused_attention() -> Iterator[None]:
    """Attention that keeps no scores, as a GPU's; such tensors take PyTorch's unfused path otherwise."""

    def flash(query: Any, key: Any, value: Any, attn_mask: Any = None, **rest: Any) -> Any:
        rest.pop("enable_gqa", None)
        return FLASH(query, key, value, attn_mask=attn_mask, **rest)[0]

    with ExitStack() as names:
        for module in (torch.nn.functional, formula, agent):
            names.enter_context(mock.patch.object(module, "scaled_dot_product_attention", flash))
        yield
