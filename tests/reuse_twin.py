"""What reuse has to give, computed the long way: each call in whole, then its parts put in place by hand."""

from __future__ import annotations

from typing import Any

import torch


def entrance(unet: Any, layers: int = 1) -> Any:
    """The module whose output enters the last layers of the last up block."""
    last = unet.up_blocks[-1]
    if layers == len(last.resnets):
        return unet.up_blocks[-2]
    for parts in ("motion_modules", "attentions", "resnets"):
        if getattr(last, parts, None):
            return getattr(last, parts)[-layers - 1]
    raise AssertionError


class Twin:
    """Hooks on a U-Net without agentsd that make each of its calls what a letter of `symbols` says.

    F and f are a full and a cheap call (order 0), H and h those of the conditional pass alone.
    """

    def __init__(self, unet: Any, symbols: str, layers: int = 1) -> None:
        self.left = list(symbols)
        self.kind = ""
        self.kept: Any = None
        self.difference: Any = None
        self.hooks = [
            unet.register_forward_pre_hook(lambda module, args: setattr(self, "kind", self.left.pop(0))),
            entrance(unet, layers).register_forward_hook(self.enter),
            unet.register_forward_hook(self.give),
        ]

    def enter(self, module: Any, args: Any, output: Any) -> Any:
        state = output[0] if isinstance(output, tuple) else output
        half = state.shape[0] // 2
        if self.kind in "Ff" and (self.kept is None or self.kept.shape != state.shape):
            assert self.kind == "F"
            self.kept = state.clone()
        elif self.kind == "F":
            self.kept = state.clone()
        elif self.kind == "H":
            self.kept = torch.cat([self.kept[:half], state[half:]])
        else:
            state = self.kept.clone()
            return (state,) if isinstance(output, tuple) else state
        return None

    def give(self, module: Any, args: Any, output: Any) -> Any:
        out = output[0] if isinstance(output, tuple) else output.sample
        if self.kind in "Ff":
            if out.shape[0] % 2 == 0:
                first, second = out.chunk(2)
                self.difference = second - first
            return None
        second = out.chunk(2)[1]
        out = torch.cat([second - self.difference, second])
        return (out,) if isinstance(output, tuple) else type(output)(sample=out)

    def remove(self) -> None:
        for hook in self.hooks:
            hook.remove()
