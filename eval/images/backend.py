"""Whether attention is computed fused: all of it, a method's own, too, or none."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from diffusers.models.attention_processor import AttnProcessor, AttnProcessor2_0
from torch import Tensor

from ..settings import Backend

_FUSED = torch.nn.functional.scaled_dot_product_attention
_NAME = "scaled_dot_product_attention"


@contextmanager
def attention_backend(unet: Any, backend: Backend) -> Iterator[None]:
    """Compute attention so for the length of a block, whichever part of a pipeline asks for it.

    Standard layers of the U-Net get diffusers' processor; unfused, what calls torch's function gets ours.
    """
    before, standard = dict(unet.attn_processors), (AttnProcessor, AttnProcessor2_0)
    wanted = AttnProcessor if backend == "unfused" else AttnProcessor2_0
    unet.set_attn_processor({n: wanted() if type(p) in standard else p for n, p in before.items()})
    replaces = backend == "unfused" and torch.nn.functional.scaled_dot_product_attention is _FUSED
    try:
        if replaces:
            _replace(_FUSED, unfused_attention)
        yield
    finally:
        unet.set_attn_processor(before)
        if replaces:
            _replace(unfused_attention, _FUSED)


def _replace(function: Any, other: Any) -> None:
    """Where modules have torch's function by its name, those too that were loaded since."""
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(_NAME) is function:
            setattr(module, _NAME, other)


def unfused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """torch's function on (..., N, d), in three steps and in the tensors' own precision, as AttnProcessor."""
    if enable_gqa:
        key, value = (t.repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in (key, value))
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    rows, columns = (t.flatten(0, -3) for t in (query, key))
    scores = torch.baddbmm(rows.new_empty(1, 1, 1), rows, columns.mT, beta=0, alpha=factor)
    scores = scores.view(*query.shape[:-1], key.shape[-2])
    if is_causal:
        attn_mask = torch.ones_like(scores, dtype=torch.bool).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -torch.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    return torch.dropout(scores.softmax(-1), dropout_p, dropout_p > 0) @ value
