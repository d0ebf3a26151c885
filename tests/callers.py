"""Calls of a U-Net as a pipeline makes them, without the pipeline."""

from dataclasses import dataclass
from typing import ClassVar

import diffusers
import torch
from tiny import BETAS, WIDTH

from agentsd.attention import Operator
from agentsd.attention.operator import Plan

RUN = {"num_inference_steps": 10}


def inputs(seed=0, batch=2):
    """A latent and a text for `make_unet`."""
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(batch, 4, 16, 16, generator=rng), torch.randn(batch, 7, WIDTH, generator=rng)


def ddim(steps=None, **more):
    """A scheduler under which cached steps are corrected, set for so many steps."""
    scheduler = diffusers.DDIMScheduler(**BETAS, clip_sample=False, **more)
    if steps is not None:
        scheduler.set_timesteps(steps)
    return scheduler


@torch.no_grad()
def loop(unet, scheduler, timesteps=None, text_of=None):
    """Sampling by hand: the U-Net's output in each call."""
    latents, text = inputs()
    outs = []
    for i, t in enumerate(scheduler.timesteps if timesteps is None else timesteps):
        given = text_of(i) if text_of else text
        outs.append(unet(scheduler.scale_model_input(latents, t), t, given).sample)
        latents = scheduler.step(outs[-1], t, latents).prev_sample
    return outs


@torch.no_grad()
def sampled(unet, scheduler, between=lambda scheduler, i, x: x):
    """The last latent of guided sampling by hand, with something done to the latent after each step."""
    noise, text = inputs(3)
    x = noise[:1] * scheduler.init_noise_sigma
    for i, t in enumerate(scheduler.timesteps):
        one, other = unet(scheduler.scale_model_input(torch.cat([x] * 2), t), t, text).sample.chunk(2)
        x = between(scheduler, i, scheduler.step(one + 3.0 * (other - one), t, x)[0])
    return x


def outputs(unet, caller, after=lambda i: None, calls=None, **more):
    """What the U-Net gives in each call of a run, or in some; something happens after each."""
    outs = []
    for i in range(len(caller.timesteps)) if calls is None else calls:
        outs.append(caller(unet, i, **more))
        after(i)
    return outs


def equal(outs, others):
    """Bit for bit, and as many."""
    return all(torch.equal(a, b) for a, b in zip(outs, others, strict=True))


def whole(unet):
    """No layer is replaced by a stub."""
    return not any("forward" in vars(module) for module in unet.modules())


def plant(unet, where, error):
    """Raise an error in the next call, at a place in the model."""

    def interrupt(*_):
        hook.remove()
        raise error

    hook = unet.get_submodule(where).register_forward_pre_hook(interrupt)


def draw(pipe, seed=0, **changes):
    """A pipeline's last latents, (B, 4, 16, 16), from a seed."""
    settings = {"prompt": "a cat", "num_inference_steps": 5, "output_type": "latent"} | changes
    return pipe(generator=torch.Generator().manual_seed(seed), **settings)[0]


def letters(handle):
    """F of each full call of the last run, and f of each cached one."""
    return handle.summary().split()[0]


def deepcache(pipe, interval=3):
    """Switch the DeepCache package on; returns what switches it off."""
    from DeepCache import DeepCacheSDHelper

    helper = DeepCacheSDHelper(pipe=pipe)
    helper.set_params(cache_interval=interval, cache_branch_id=0)
    helper.enable()
    return helper.disable


class Host:
    """All of a pipeline that a patch reads; a patch does not hold it."""

    def __init__(self, unet, scheduler=None):
        self.unet, self.scheduler = unet, scheduler


class Caller:
    """Calls a U-Net as a pipeline does, with elements of a scheduler's list; its latents move a little."""

    def __init__(self, steps=10, batch=2, size=(16, 16), seed=0):
        self.scheduler = ddim(steps)
        self.timesteps = self.scheduler.timesteps
        rng = torch.Generator().manual_seed(seed)
        first, other = torch.randn(2, batch, 4, *size, generator=rng)
        self.latents = torch.stack([first + 0.05 * i * other for i in range(steps)])
        self.text = torch.randn(batch, 7, 16, generator=rng)

    def pipe(self, unet):
        """What to patch so that the scheduler is known."""
        self.host = Host(unet, self.scheduler)
        return self.host

    def __call__(self, unet, i, **more):
        with torch.no_grad():
            return unet(self.latents[i], self.timesteps[i], self.text, **more).sample


class Guided(Caller):
    """Both passes of guidance in a batch: the same latents twice, on other texts."""

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        half = self.latents.shape[1] // 2
        self.latents = torch.cat([self.latents[:, :half]] * 2, dim=1)


@dataclass(frozen=True)
class Off(Operator):
    """Full attention plus something that is known."""

    name: ClassVar[str] = "off"
    constant: float = 0.0

    def plan(self, place):
        plan = Plan()
        plan.attend = lambda attn, tokens, wrapped: wrapped(tokens) + self.constant
        return plan


def attention_by_hand(attn, x, few):
    """A layer's softmax attention in float64, from all tokens (B, N, C) to fewer of them."""
    weights = {name: weight.double() for name, weight in attn.named_parameters()}
    query, key, value = (
        (tokens.double() @ weights[f"to_{part}.weight"].T).unflatten(2, (attn.heads, -1))
        for part, tokens in (("q", x), ("k", few), ("v", few))
    )
    scores = torch.einsum("bnhd,bmhd->bhnm", query, key) / query.shape[-1] ** 0.5
    out = torch.einsum("bhnm,bmhd->bnhd", scores.softmax(-1), value).flatten(2)
    return out @ weights["to_out.0.weight"].T + weights["to_out.0.bias"]
