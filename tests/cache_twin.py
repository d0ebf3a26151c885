"""What caching has to give, the long way: each call in whole, then its parts put in place by hand."""

import copy

import torch
from tiny import training_sigma as sigma


def entrance(unet, layers=1):
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

    F and f are a full and a cached step (order 0). With a scheduler, full steps make up for the cached
    ones before them.
    """

    def __init__(self, unet, symbols, layers=1, scheduler=None):
        self.left = list(symbols)
        self.wrong = {}  # by call: what it gave less what was right
        self.call = -1
        self.kind = ""
        # what is not linear is not corrected
        config = getattr(scheduler, "config", {})
        linear = not (config.get("clip_sample") or config.get("thresholding"))
        self.scheduler = scheduler if linear else None
        self.entering = None  # of a cached step that is computed again
        self.known = []  # [(noise level, state)]
        self.cached = []
        self.corrected = 0  # cached steps
        self.hooks = [
            unet.register_forward_pre_hook(self.begin, with_kwargs=True),
            entrance(unet, layers).register_forward_hook(self.enter),
            unet.register_forward_hook(self.give, with_kwargs=True),
        ]

    def begin(self, module, args, kwargs):
        if self.entering is None:
            self.kind = self.left.pop(0)
            timestep = args[1] if len(args) > 1 else kwargs["timestep"]
            self.timestep = float(timestep)
            if self.scheduler is not None:
                self.begin_run()

    def begin_run(self):
        """Note, by a copy of the scheduler, what a unit of each output adds to each later latent."""
        timesteps = self.scheduler.timesteps.tolist()
        if self.call < 0 or self.call >= len(timesteps):
            scheduler, units = copy.deepcopy(self.scheduler), torch.eye(len(timesteps), dtype=torch.float64)
            self.response, self.scales, self.wrong = [0 * units[:1]], [], {}
            for unit, t in zip(units, scheduler.timesteps, strict=True):
                self.scales.append(float(scheduler.scale_model_input(torch.ones(1), t)))
                self.response.append(scheduler.step(unit[None], t, self.response[-1]).prev_sample)
            self.call = timesteps.index(self.timestep)

    def enter(self, module, args, output):
        state = output[0] if isinstance(output, tuple) else output
        if self.entering is not None:
            state = self.entering.clone()
        elif self.kind == "F":
            if self.known and self.known[-1][1].shape != state.shape:
                self.known, self.cached, self.wrong = [], [], {}
            level = self.level(self.call, self.timestep)
            others = [x for x in self.known if x[0] != level]
            self.known = [*others, (level, state.clone())]
            return None
        else:
            state = self.known[-1][1].clone()
        return (state,) if isinstance(output, tuple) else state

    def line(self, level):
        """The state between the last two."""
        (before, start), (last, end) = self.known[-2:] if len(self.known) > 1 else 2 * self.known
        share = (level - before) / ((last - before) or 1.0)
        return start + share * (end - start)

    def give(self, module, args, kwargs, output):
        if self.entering is not None:
            return None
        out = output[0] if isinstance(output, tuple) else output.sample
        if self.scheduler is not None:
            out = self.cached_call(args, kwargs, out) if self.kind == "f" else self.computed_call(module, out)
            self.call += 1
        return (out,) if isinstance(output, tuple) else type(output)(sample=out)

    def cached_call(self, args, kwargs, out):
        """A cached call's output makes up for what multistep samplers have kept of those before it."""
        given = out + self.change()
        self.cached.append((self.call, self.timestep, args, kwargs, out, given))
        return given

    def computed_call(self, unet, out):
        """A full call's output is changed by what takes its step to where the run would have been."""
        if self.cached:
            change = self.change_of_the_last(unet)
            (before, *_), *_ = self.known[-2:]
            whole = self.level(*self.cached[-1][:2]) - before
            for call, timestep, *_, got, given in self.cached:
                share = (self.level(call, timestep) - before) / whole if whole else 1.0
                self.wrong[call] = given - self.right(call, timestep, got + share * change)
                self.corrected += 1
        self.cached = []
        best = self.right(self.call, self.timestep, out)
        change = self.wrong[self.call] = self.change()
        return best + change

    def change_of_the_last(self, unet):
        """How the last cached call's output changes on the state between those that are known now."""
        call, timestep, args, kwargs, out, _ = self.cached[-1]
        self.entering = self.line(self.level(call, timestep))
        again = unet(*args, **kwargs)
        self.entering = None
        return (again[0] if isinstance(again, tuple) else again.sample) - out

    def right(self, call, timestep, out):
        """An output on the right latent: as Gaussian data of unit variance answer to a latent."""
        level, off = self.level(call, timestep), self.scales[call] * self.latent_error(call)
        slope = {"epsilon": level, "sample": 1.0, "v_prediction": 0.0}[self.scheduler.config.prediction_type]
        return out - slope / (1 + level**2) ** 0.5 * off

    def change(self):
        """What takes the next latent to where right outputs would have taken it."""
        own = float(self.response[self.call + 1][0, self.call])
        return -self.latent_error(self.call + 1) / own if own else 0.0

    def latent_error(self, at):
        """How far wrong outputs move the latent of a call."""
        return sum(float(self.response[at][0, call]) * wrong for call, wrong in self.wrong.items())

    def level(self, call, timestep):
        own = getattr(self.scheduler, "sigmas", None)
        known = own is not None and len(own) == len(self.scheduler.timesteps) + 1
        return float(own[call]) if known else sigma(timestep)

    def remove(self):
        for hook in self.hooks:
            hook.remove()
