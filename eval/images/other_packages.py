"""Baselines from other packages and papers, and upper bounds on speed.

Each takes a pipeline, one number and the seed of its own random choices, is in force for a `with` block, and
leaves no trace.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import tomesd as tomesd_package
import torch

from agentsd import Downsample, Recipe, apply_agentsd
from agentsd.hosts import EVERY_LEVEL, find_attention_layers

from ..errors import EvalError
from .skipped_calls import EasyCache, Spectrum, skipped_calls


def unet_of(pipe: Any) -> Any:
    """Return the U-Net of a pipeline, or the U-Net itself."""
    return getattr(pipe, "unet", pipe)


def finest_attention_downsample(unet: Any) -> int:
    """Return how much the first level with attention is downsampled: 1 in SD 1.x, 2 in SDXL."""
    for level, block in enumerate(unet.down_blocks):
        if getattr(block, "attentions", None):
            return 2**level
    raise EvalError(
        f"{type(unet).__name__} has no attention in its down blocks, so there is nothing to merge"
    )


@contextmanager
def tomesd(pipe: Any, ratio: float, seed: int) -> Iterator[None]:
    """Token merging at a ratio, by its own package."""
    unet = unet_of(pipe)
    # tomesd counts levels from the latent; its default of 1 would patch nothing in SDXL.
    tomesd_package.apply_patch(unet, ratio=ratio, max_downsample=finest_attention_downsample(unet))
    device = next(unet.parameters()).device
    own = "cpu" if device.type == "meta" else device
    unet._tome_info["args"]["generator"] = torch.Generator(own).manual_seed(seed)
    try:
        yield
    finally:
        tomesd_package.remove_patch(unet)
        for module in unet.modules():
            module.__dict__.pop("_tome_info", None)


@contextmanager
def forwards_kept(unet: Any) -> Iterator[None]:
    """Put back what packages leave on modules: a `forward` on each that they wrapped."""
    before = {module: module.__dict__.get("forward") for module in unet.modules()}
    try:
        yield
    finally:
        for module, forward in before.items():
            if forward is None:
                module.__dict__.pop("forward", None)
            else:
                module.forward = forward


@contextmanager
def deepcache(pipe: Any, interval: int, seed: int) -> Iterator[None]:
    """DeepCache with one full step in `interval`, by its own package."""
    from DeepCache import DeepCacheSDHelper

    helper = DeepCacheSDHelper(pipe=pipe)
    helper.set_params(cache_interval=interval, cache_branch_id=0)
    with forwards_kept(pipe.unet):
        helper.enable()
        try:
            yield
        finally:
            helper.disable()


@contextmanager
def todo(pipe: Any, ratio: None, seed: int) -> Iterator[None]:
    """ToDo (Smith et al. 2024): keys and values of every second token each way, in every step."""
    with apply_agentsd(pipe, recipe=Recipe(Downsample())):
        yield


class _NoCore:
    """A self-attention processor whose values pass straight through; every projection is still computed."""

    def __call__(self, attn: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        attn.to_q(hidden_states)
        attn.to_k(hidden_states)
        return attn.to_out[0](attn.to_v(hidden_states))


@contextmanager
def no_attention(pipe: Any, ratio: None, seed: int, levels: int) -> Iterator[None]:
    """No attention between the tokens of the finest levels: what no method on them can be faster than.

    Its images mean nothing.
    """
    layers: list[Any] = [site.attn for site in find_attention_layers(unet_of(pipe), levels, at_most=True)]
    before = [layer.processor for layer in layers]
    for layer in layers:
        layer.set_processor(_NoCore())
    try:
        yield
    finally:
        for layer, processor in zip(layers, before, strict=True):
            layer.set_processor(processor)


OTHER_PACKAGES: dict[str, Callable[[Any, Any, int], AbstractContextManager[None]]] = {
    "tomesd": tomesd,
    "todo": todo,
    "deepcache": deepcache,
    "spectrum": partial(skipped_calls, rule=Spectrum),
    "easycache": partial(skipped_calls, rule=EasyCache),
    "no-attention": partial(no_attention, levels=1),
    "no-attention-all": partial(no_attention, levels=EVERY_LEVEL),
}
"""By the name of each, without its number."""
