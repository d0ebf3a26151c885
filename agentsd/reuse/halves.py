"""The conditional half of a guided call, and the call's output from that half's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def conditional_half(value: Any, batch: int) -> Any:
    """The second half of each tensor that has the batch first, also inside mappings, lists and tuples.

    Args:
        value: an argument of the call.
        batch: pictures in both halves; a tensor of so many rows or a multiple (a video's frames) is halved.
    """
    if isinstance(value, Tensor):
        rows = value.shape[0] if value.ndim else 0
        return value[rows // 2 :] if rows and rows % batch == 0 else value
    if isinstance(value, Mapping):
        return {name: conditional_half(item, batch) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([conditional_half(item, batch) for item in value])
    return value


def is_guided(sample: Tensor, text: Any) -> bool:
    """Whether two passes of guidance are in a batch: the same latents twice, on other texts.

    Waits for the device.
    """
    if sample.shape[0] % 2:
        return False
    first, second = sample.chunk(2)
    if not torch.equal(first, second):
        return False
    return not isinstance(text, Tensor) or text.shape[0] % 2 > 0 or not torch.equal(*text.chunk(2))


def difference_of(sample: Tensor) -> Tensor:
    """Conditional minus unconditional prediction: (2B, ...) -> (B, ...)."""
    unconditional, conditional = sample.chunk(2)
    return conditional - unconditional


def both_halves(conditional: Tensor, difference: Tensor) -> Tensor:
    """(B, ...) -> (2B, ...), as a whole call gives it."""
    return torch.cat([conditional - difference, conditional])


def sample_of(output: Any) -> Tensor:
    """The prediction in what a U-Net returns."""
    sample: Tensor = output[0] if isinstance(output, tuple) else output.sample
    return sample


def with_sample(output: Any, sample: Tensor) -> Any:
    """The same with another prediction."""
    if isinstance(output, tuple):
        return (sample, *output[1:])
    return type(output)(sample=sample)
