"""What other packages and papers make faster, and what nothing can be faster than.

Each takes a pipeline and one number, is in force for a `with` block, and leaves no trace.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import tomesd as tomesd_package
import torch
from diffusers import StableDiffusionPipeline

from agentsd import Downsample, Recipe, apply_agentsd
from agentsd.hosts.models import EVERY_LEVEL, find_attention_layers

from ..errors import EvalError
from .forecast import forecast

Reseed = Callable[[int], None]
Rival = Callable[[Any, Any], AbstractContextManager[Reseed]]


def nothing(seed: int) -> None:
    """Fix no random choice: the method has none of its own."""


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
def tomesd(pipe: Any, ratio: float) -> Iterator[Reseed]:
    """Token merging at a ratio, by its own package."""
    unet = unet_of(pipe)
    # tomesd counts levels from the latent; its default of 1 would patch nothing in SDXL.
    tomesd_package.apply_patch(pipe, ratio=ratio, max_downsample=finest_attention_downsample(unet))

    def reseed(seed: int) -> None:
        device = next(unet.parameters()).device
        unet._tome_info["args"]["generator"] = torch.Generator(device).manual_seed(seed)

    try:
        yield reseed
    finally:
        tomesd_package.remove_patch(pipe)
        for module in unet.modules():
            module.__dict__.pop("_tome_info", None)


@contextmanager
def _forwards_kept(unet: Any) -> Iterator[None]:
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
def deepcache(pipe: Any, interval: int) -> Iterator[Reseed]:
    """DeepCache with one whole call in `interval`, by its own package."""
    from DeepCache import DeepCacheSDHelper

    helper = DeepCacheSDHelper(pipe=pipe)
    helper.set_params(cache_interval=interval, cache_branch_id=0)
    with _forwards_kept(pipe.unet):
        helper.enable()
        try:
            yield nothing
        finally:
            helper.disable()


@contextmanager
def tgate(pipe: Any, gate_step: int) -> Iterator[Reseed]:
    """T-GATE by its own package: from `gate_step` on no guidance, and cross-attention's outputs are kept.

    Before the gate, self-attention's outputs are renewed in every fifth step, as the package has it.
    """
    kind: type = type(pipe)
    if kind is not StableDiffusionPipeline:
        raise EvalError(
            f"T-GATE's package has no way for a {kind.__name__} here: take a StableDiffusionPipeline"
        )
    from tgate.SD import tgate as call

    def gated(self: Any, *args: Any, **kwargs: Any) -> Any:
        return call(self, *args, **kwargs, gate_step=gate_step)

    with _forwards_kept(pipe.unet):
        pipe.__class__ = type(kind.__name__, (kind,), {"__call__": gated, "__module__": kind.__module__})
        try:
            yield nothing
        finally:
            pipe.__class__ = kind
            for module in pipe.unet.modules():
                module.__dict__.pop("cache", None)


@contextmanager
def todo(pipe: Any, ratio: None) -> Iterator[Reseed]:
    """ToDo (Smith et al. 2024): keys and values of every second token each way, in every step."""
    with apply_agentsd(pipe, recipe=Recipe(Downsample())):
        yield nothing


class _NoCore:
    """A self-attention processor whose values pass straight through; every projection is still computed."""

    def __call__(self, attn: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        attn.to_q(hidden_states)
        attn.to_k(hidden_states)
        return attn.to_out[0](attn.to_v(hidden_states))


@contextmanager
def limit(pipe: Any, ratio: None, levels: int) -> Iterator[Reseed]:
    """No attention between the tokens of the finest levels: what no method on them can be faster than.

    Its pictures mean nothing.
    """
    layers: list[Any] = [site.attn for site in find_attention_layers(unet_of(pipe), levels, at_most=True)]
    before = [layer.processor for layer in layers]
    for layer in layers:
        layer.set_processor(_NoCore())
    try:
        yield nothing
    finally:
        for layer, processor in zip(layers, before, strict=True):
            layer.set_processor(processor)


@contextmanager
def forecasting(pipe: Any, every: int) -> Iterator[Reseed]:
    """Clean latents forecast in place of whole calls."""
    with forecast(pipe, every):
        yield nothing


RIVALS: dict[str, Rival] = {
    "tomesd": tomesd,
    "todo": todo,
    "deepcache": deepcache,
    "tgate": tgate,
    "forecast": forecasting,
    "limit": partial(limit, levels=1),
    "limit-all": partial(limit, levels=EVERY_LEVEL),
}
"""By the name of each, without its number."""
