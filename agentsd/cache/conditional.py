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
        batch: images in both halves; a tensor of so many rows or a multiple (a video's frames) is halved.
    """
    if isinstance(value, Tensor):
        rows = value.shape[0] if value.ndim else 0
        return value[rows // 2 :] if rows and rows % batch == 0 else value
    if isinstance(value, Mapping):
        return {name: conditional_half(item, batch) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([conditional_half(item, batch) for item in value])
    return value


# A U-Net's arguments that have the batch first, and of `cross_attention_kwargs` those that have not.
_BATCHED = frozenset(
    {
        "sample",
        "timestep",
        "timestep_cond",
        "class_labels",
        "encoder_hidden_states",
        "attention_mask",
        "encoder_attention_mask",
        "added_cond_kwargs",
        "controlnet_cond",
        "down_block_additional_residuals",
        "down_intrablock_additional_residuals",
        "mid_block_additional_residual",
    }
)
_BATCHED_INSIDE = frozenset({"gligen"})
_SHARED_INSIDE = frozenset({"ip_adapter_masks"})
_INSIDE = "cross_attention_kwargs"


def conditional_arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """A guided call's arguments by name, as they are in its conditional half."""
    batch = given["sample"].shape[0]
    halved = {n: conditional_half(v, batch) if n in _BATCHED else v for n, v in given.items()}
    if inside := given.get(_INSIDE):
        some = {n: conditional_half(v, batch) if n in _BATCHED_INSIDE else v for n, v in inside.items()}
        halved[_INSIDE] = some
    return halved


def unknown_argument(given: Mapping[str, Any]) -> str:
    """The name of an argument with tensors of which it isn't known whether they have the batch first."""
    for name, value in given.items():
        if name not in _BATCHED and name != _INSIDE and _has_tensors(value):
            return name
    for name, value in (given.get(_INSIDE) or {}).items():
        if name not in _BATCHED_INSIDE | _SHARED_INSIDE and _has_tensors(value):
            return f"{_INSIDE}[{name!r}]"
    return ""


def _has_tensors(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_tensors, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_has_tensors, value))
    return isinstance(value, Tensor)


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


def both_passes(conditional: Tensor, difference: Tensor) -> Tensor:
    """(B, ...) -> (2B, ...), as a guided step gives it."""
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
