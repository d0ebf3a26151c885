"""The layers that a cached call skips, and the hidden state that enters the layers it computes.

torch's hooks cannot skip a forward. So during a cached call, each skipped block has a stub from this file
as its instance's `forward`. The U-Net's own forward runs around the stubs. Between calls nothing is
replaced: copies, pickles, offloading and third-party hooks see the model as it is. Dynamo guards on an
instance's `forward`, so a cached call gets a graph of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils._pytree import tree_map_only

from .checks import check
from .hosts import ADAPTER_RESIDUALS, DOWN_RESIDUALS, MID_RESIDUAL, remove_hooks, takes

_PARTS = ("resnets", "attentions", "motion_modules")
_DOWN = ("DownBlock2D", "CrossAttnDownBlock2D", "DownBlockMotion", "CrossAttnDownBlockMotion")
_UP = ("UpBlock2D", "CrossAttnUpBlock2D", "UpBlockMotion", "CrossAttnUpBlockMotion")


def stub(*args: Any, **kwargs: Any) -> Tensor:
    """Stand in for a layer: return a sliver of the input, with which the host's code can go on."""
    x: Any = args[0] if args else kwargs.get("hidden_states", kwargs.get("input_tensor"))
    sliver: Tensor = x[..., :1, :1, :1]
    return sliver


def stub_in_a_tuple(*args: Any, **kwargs: Any) -> tuple[Tensor]:
    """Stand in for a layer that returns a tuple."""
    return (stub(*args, **kwargs),)


def down_block_stub(count: int, *args: Any, **kwargs: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Stand in for a down block with `count` outputs for the up blocks."""
    x = stub(*args, **kwargs)
    return x, (x,) * count


class FeatureHook:
    """Forward hook on the module before the last layers: it reads their input, or replaces it.

    Attributes:
        hidden: (B, C, H, W) the input that a cached call gets; None in a full call.
        computed: (B, C, H, W) the input that a full call had.
        compiled: whether the hook last ran in a compiled graph.
        aliased: whether the host writes into this tensor (FreeU on the last up block).
    """

    def __init__(self) -> None:
        self.compiled = self.aliased = False
        self.hidden: Tensor | None = None
        self.computed: Tensor | None = None

    def __call__(self, module: Module, args: Any, output: Any) -> Any:
        """Forward hook."""
        self.compiled = torch.compiler.is_compiling()
        state = self.hidden
        if state is None:
            state = self.computed = output[0] if isinstance(output, tuple) else output
            if not self.aliased:
                return None
        if self.aliased:
            state = state.clone()
        return (state,) if isinstance(output, tuple) else state


class SkippedLayers:
    """The layers of a U-Net that a cached call skips.

    Args:
        unet: the model.
        layers: how many last layers of the last up block are computed; None if nothing is cached.

    Raises:
        ValueError: the model's blocks are not Stable Diffusion's, or the last one has fewer layers.
    """

    def __init__(self, unet: Any, layers: int | None) -> None:
        self._stubs: list[tuple[Module, Callable[..., Any]]] = []
        self._own: dict[Module, Any] = {}  # what the stubs replaced
        self._names: dict[str, Module] = {}
        self._hooked: Module | None = None
        self.feature_hook = FeatureHook()
        if layers is None:
            return
        _check_blocks(unet)
        *others, last = unet.up_blocks
        count = len(last.resnets)
        way_out = f"the last up block has {count}: pass at most that"
        check("layers", layers, layers <= count, way_out)
        first, *deeper = unet.down_blocks
        mid = [unet.mid_block] if unet.mid_block is not None else []
        before = [*mid, *others, *([last] if layers == 0 else [])]  # in front of the computed layers
        self._skips = layers
        self._has_adapter = takes(unet, ADAPTER_RESIDUALS)
        self._takes_adapter = layers > len(first.resnets) and getattr(first, "has_cross_attention", False)
        if layers <= 1:
            deeper = [first, *deeper]
        else:
            self._stubs += [pair for layer in _layers(first)[layers - 1 :] for pair in layer]
            self._stubs += [(module, stub) for module in first.downsamplers or ()]
        for block in deeper:
            outputs = len(block.resnets) + len(block.downsamplers or ())
            self._stubs.append((block, partial(down_block_stub, outputs)))
        self._stubs += [(block, stub) for block in before]
        self._stubs += [pair for layer in _layers(last)[: count - layers] for pair in layer]
        self._hooked = _layers(last)[count - layers - 1][-1][0] if 0 < layers < count else before[-1]
        self.feature_hook.aliased = getattr(last, "resolution_idx", None) in (0, 1)
        known = {self._hooked, *(module for module, _ in self._stubs)}
        self._names = {name: module for name, module in unet.named_modules() if module in known}

    def are_in(self, unet: Any) -> bool:
        """Return whether the model still has these layers in the same places."""
        named = dict(unet.named_modules())
        return all(named.get(name) is module for name, module in self._names.items())

    def attach(self) -> None:
        """Add the feature hook."""
        if self._hooked is not None:
            self._hooked.register_forward_hook(self.feature_hook)

    def detach(self) -> None:
        """Remove the feature hook."""
        if self._hooked is not None:
            remove_hooks(self._hooked, self.feature_hook)

    def holds(self, layer: Module) -> bool:
        """Return whether a layer is skipped."""
        return any(layer is inner for module, _ in self._stubs for inner in module.modules())

    def begin(self, hidden: Tensor, given: dict[str, Any], again: bool) -> dict[str, Any]:
        """Skip the layers in the call that starts; return the call's arguments.

        Args:
            hidden: (B, C, H, W) the input of the computed layers.
            given: the call's arguments, by name.
            again: whether the arguments will be used again. Then they are copied: a sampler may write into
                the latent, and a ControlNet's CUDA graph into its residuals.
        """
        self.put(hidden)
        given = self._without_residuals(given)
        if again:
            names = [name for name in ("sample", DOWN_RESIDUALS, ADAPTER_RESIDUALS) if name in given]
            given |= {name: tree_map_only(Tensor, torch.clone, given[name]) for name in names}
        return given

    # An interruption may come between any two lines. So `forward` is saved before it is replaced, restored
    # only where it is seen to be replaced, and forgotten last.

    def put(self, hidden: Tensor) -> None:
        """From now on, skip the layers and compute the last ones on `hidden`."""
        self.feature_hook.hidden = hidden
        for module, forward in self._stubs:
            attributes = vars(module)
            if attributes.get("forward") is not forward:
                self._own[module] = attributes.get("forward")
                attributes["forward"] = forward

    def end(self) -> Tensor | None:
        """From now on, skip nothing; return the state that a full call had."""
        for module, forward in self._stubs:
            attributes = vars(module)
            if attributes.get("forward") is not forward:
                continue
            if self._own[module] is None:
                del attributes["forward"]
            else:
                attributes["forward"] = self._own[module]
        self._own.clear()
        hook = self.feature_hook
        computed, hook.computed, hook.hidden = hook.computed, None, None
        return computed

    def suspend(self) -> tuple[Tensor | None, Tensor | None]:
        """Skip nothing for a while; return what `resume` takes."""
        state = self.feature_hook.hidden, self.feature_hook.computed
        self.end()
        return state

    def resume(self, hidden: Tensor | None, computed: Tensor | None) -> None:
        """Go on as before `suspend`."""
        self.end()
        if hidden is not None:
            self.put(hidden)
        self.feature_hook.computed = computed

    def _without_residuals(self, given: dict[str, Any]) -> dict[str, Any]:
        """Drop the residuals of ControlNet and T2I-Adapter that the computed layers don't need."""
        given = dict(given)
        mid, down = (given.get(name) for name in (MID_RESIDUAL, DOWN_RESIDUALS))
        if mid is not None:
            given[MID_RESIDUAL] = 0
        if self._has_adapter and mid is None and down is not None and given.get(ADAPTER_RESIDUALS) is None:
            given |= {ADAPTER_RESIDUALS: down, DOWN_RESIDUALS: None}  # as the host reads it
        elif down is not None:
            given[DOWN_RESIDUALS] = [*down[: self._skips], *[0] * (len(down) - self._skips)]
        if given.get(ADAPTER_RESIDUALS) is not None:
            given[ADAPTER_RESIDUALS] = list(given[ADAPTER_RESIDUALS][: int(self._takes_adapter)])
        return given


def _layers(block: Any) -> list[list[tuple[Module, Callable[..., Any]]]]:
    """Return a block's layers in order: the modules of each, with their stubs."""
    parts = [
        [(module, stub_in_a_tuple if name == "attentions" else stub) for module in modules]
        for name in _PARTS
        if (modules := getattr(block, name, None))
    ]
    return [list(layer) for layer in zip(*parts, strict=True)]


def _check_blocks(unet: Any) -> None:
    kind, way_out = type(unet).__name__, 'pass mode="agentsd", or a recipe without steps'
    blocks = [*((block, _DOWN) for block in unet.down_blocks), *((block, _UP) for block in unet.up_blocks)]
    for block, known in blocks:
        if not any(base.__name__ in known for base in type(block).__mro__):
            raise ValueError(f"{kind} has a {type(block).__name__}, which no cached step knows: {way_out}")
    if len(unet.up_blocks) < 2 and unet.mid_block is None:
        raise ValueError(f"{kind} has no layer that could be skipped: {way_out}")
