"""What caching has to give, the long way: each call in whole, then its parts put in place by hand."""

from __future__ import annotations

from typing import Any

import torch
from tiny import training_sigma as sigma


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

    F and f are a full and a cached step (order 0), H and h those of the conditional pass alone. With a
    scheduler, computed steps make up for the cached ones before them.
    """

    def __init__(self, unet: Any, symbols: str, layers: int = 1, scheduler: Any = None) -> None:
        self.left = list(symbols)
        self.kind = ""
        self.scheduler = scheduler
        self.entering: Any = None  # of a cached step that is computed again
        self.known: list[list[Any]] = [[], []]  # [(sigma, state)] of either half
        self.difference: Any = None
        self.cached: list[Any] = []
        self.corrected = 0  # cached steps
        self.hooks = [
            unet.register_forward_pre_hook(self.begin, with_kwargs=True),
            entrance(unet, layers).register_forward_hook(self.enter),
            unet.register_forward_hook(self.give, with_kwargs=True),
        ]

    def begin(self, module: Any, args: Any, kwargs: Any) -> None:
        if self.entering is None:
            self.kind = self.left.pop(0)
            timestep = args[1] if len(args) > 1 else kwargs["timestep"]
            self.timestep = float(timestep)

    def enter(self, module: Any, args: Any, output: Any) -> Any:
        state = output[0] if isinstance(output, tuple) else output
        if self.entering is not None:
            state = self.entering.clone()
        elif self.kind in "FH":
            halves = state.chunk(2) if state.shape[0] % 2 == 0 else (state, state)
            if self.known[1] and self.known[1][-1][1].shape != halves[1].shape:
                self.known, self.cached = [[], []], []
            for known, half in zip(self.known, halves, strict=True):
                if self.kind == "F" or known is self.known[1]:
                    known[:] = [*(x for x in known if x[0] != self.timestep), (self.timestep, half.clone())]
            return None
        else:
            state = self.together(state, [known[-1][1] for known in self.known])
        return (state,) if isinstance(output, tuple) else state

    def together(self, like: Any, halves: Any) -> Any:
        return torch.cat(halves) if like.shape[0] % 2 == 0 else halves[1].clone()

    def line(self, timestep: float) -> list[Any]:
        """Of either half the state between the last two."""
        states = []
        for known in self.known:
            (before, start), (last, end) = known[-2:] if len(known) > 1 else 2 * known
            share = (sigma(timestep) - sigma(before)) / ((sigma(last) - sigma(before)) or 1.0)
            states.append(start + share * (end - start))
        return states

    def give(self, module: Any, args: Any, kwargs: Any, output: Any) -> Any:
        if self.entering is not None:
            return None
        out = output[0] if isinstance(output, tuple) else output.sample
        raw, letter = out, self.kind
        if letter in "Ff":
            if out.shape[0] % 2 == 0:
                first, second = out.chunk(2)
                self.difference = second - first
        else:
            second = out.chunk(2)[1]
            out = torch.cat([second - self.difference, second])
        if letter in "fh":
            self.cached.append((letter, self.timestep, args, kwargs, raw))
        elif self.cached:
            out = out + self.change(module, out)
            self.cached = []
        return (out,) if isinstance(output, tuple) else type(output)(sample=out)

    def change(self, unet: Any, out: Any) -> Any:
        """A computed step's output is changed by what takes its step to where the run would have been."""
        now = self.noise(self.timestep)
        if self.scheduler is None or now is None:
            return 0.0
        self.corrected += len(self.cached)
        both = self.kind == "F" and all(letter == "f" for letter, *_ in self.cached)
        moved: Any = 0.0  # of the latent at noise level sigma, over alpha
        for _, timestep, args, kwargs, raw in self.cached:
            self.entering = self.together(raw, self.line(timestep))
            again = unet(*args, **kwargs)
            self.entering = None
            again = again[0] if isinstance(again, tuple) else again.sample
            wrong = raw - again
            if not both and wrong.shape[0] % 2 == 0:
                wrong = wrong.chunk(2)[1]
            here, after = self.noise(timestep)
            clean = moved / (1 + here**2) + self.clean(here) * wrong
            moved = moved + (after / here - 1) * (moved - clean)
        here, after = now
        with_no_change = moved + (after / here - 1) * (moved - moved / (1 + here**2))
        change = with_no_change / (after / here - 1) / self.clean(here)
        return change if len(change) == len(out) else torch.cat([change, change])

    def clean(self, here: float) -> float:
        """How the denoised latent, over alpha, follows the prediction."""
        alpha = (1 + here**2) ** -0.5
        return {"epsilon": -here, "sample": 1.0, "v_prediction": -here * alpha}[
            self.scheduler.config.prediction_type
        ]

    def noise(self, timestep: float) -> tuple[float, float] | None:
        """Its noise level and that of the next step."""
        levels = self.scheduler and [float(t) for t in self.scheduler.timesteps]
        name = type(self.scheduler).__name__
        if not levels or name in ("PNDMScheduler", "HeunDiscreteScheduler", "DDIMInverseScheduler"):
            return None
        place = min(range(len(levels)), key=lambda i: abs(levels[i] - timestep))
        own = getattr(self.scheduler, "sigmas", None)
        noise = [sigma(t) for t in levels] + [0.0] if own is None else [float(x) for x in own]
        return noise[place], noise[place + 1]

    def remove(self) -> None:
        for hook in self.hooks:
            hook.remove()
