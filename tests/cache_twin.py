"""What caching has to give, the long way: each call in whole, then its parts put in place by hand."""

from __future__ import annotations

from typing import Any

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

    F and f are a full and a cached step (order 0). With a scheduler, computed steps make up for the cached
    ones before them.
    """

    def __init__(self, unet: Any, symbols: str, layers: int = 1, scheduler: Any = None) -> None:
        self.left = list(symbols)
        self.kind = ""
        self.scheduler = scheduler
        self.entering: Any = None  # of a cached step that is computed again
        self.known: list[Any] = []  # [(timestep, state)]
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
        elif self.kind == "F":
            if self.known and self.known[-1][1].shape != state.shape:
                self.known, self.cached = [], []
            others = [x for x in self.known if x[0] != self.timestep]
            self.known = [*others, (self.timestep, state.clone())]
            return None
        else:
            state = self.known[-1][1].clone()
        return (state,) if isinstance(output, tuple) else state

    def line(self, timestep: float) -> Any:
        """The state between the last two."""
        (before, start), (last, end) = self.known[-2:] if len(self.known) > 1 else 2 * self.known
        share = (sigma(timestep) - sigma(before)) / ((sigma(last) - sigma(before)) or 1.0)
        return start + share * (end - start)

    def give(self, module: Any, args: Any, kwargs: Any, output: Any) -> Any:
        if self.entering is not None:
            return None
        out = output[0] if isinstance(output, tuple) else output.sample
        if self.kind == "f":
            self.cached.append((self.timestep, args, kwargs, out))
        elif self.cached:
            out = out + self.change(module)
            self.cached = []
        return (out,) if isinstance(output, tuple) else type(output)(sample=out)

    def change(self, unet: Any) -> Any:
        """A computed step's output is changed by what takes its step to where the run would have been."""
        now = self.noise(self.timestep)
        if self.scheduler is None or now is None:
            return 0.0
        self.corrected += len(self.cached)
        moved: Any = 0.0  # of the latent at noise level sigma, over alpha
        for timestep, args, kwargs, given in self.cached:
            self.entering = self.line(timestep)
            again = unet(*args, **kwargs)
            self.entering = None
            wrong = given - (again[0] if isinstance(again, tuple) else again.sample)
            here, after = self.noise(timestep)
            clean = moved / (1 + here**2) + self.clean(here) * wrong
            moved = moved + (after / here - 1) * (moved - clean)
        here, after = now
        with_no_change = moved + (after / here - 1) * (moved - moved / (1 + here**2))
        return with_no_change / (after / here - 1) / self.clean(here)

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
