"""Images do not change: every kind of settings gives what it gave at commit b2348a6."""

from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from callers import Host
from diffusers import DDIMScheduler, DDPMScheduler
from recipes import AGENTS_THEN_KEYS, TODO
from safetensors.torch import load_file
from tiny import BETAS, WIDTH, make_sdxl_unet, make_unet

from agentsd import Agents, ByDistance, Downsample, Merge, Phases, PooledAgents, Recipe, apply_agentsd
from agentsd.modules import AgentModule, AttnZero, FocusedLinear
from agentsd.recipe import AGENTSD

RECORDED = load_file(Path(__file__).with_name("recordings.safetensors"))
PAPER = {"ranking": "layer", "at_most": None, "agent_ratio": 0.95}
"""Agents as in the paper's mode."""
MERGE = Merge(ranking="layer")
POOLED = {"k": 0.075, "scale": -0.15}
"""AgentSD's formula, of pooled agents."""


def paper(late=MERGE, early_frac=0.4, **settings):
    """The paper's mode with other settings."""
    if late is MERGE and "ratio" in settings:
        late = replace(MERGE, ratio=settings["ratio"])
    return Recipe(Phases(Agents(**PAPER | settings), late, early_frac), levels=1)


def agents(late=Downsample(), early=Agents(), **more):  # noqa: B008
    """Agents, then downsampled keys, with other settings."""
    return Recipe(Phases(early, late), **more)


def pooled(*counts):
    return [PooledAgents(count, at_most=None, **POOLED) for count in counts]


def mediators(*stages):
    return Recipe(ByDistance(stages, (0.98, 0.9)), levels=1)


USUAL = {"grid": (16, 16), "batch": 2, "steps": 5, "noisy": False, "unet": make_unet}
Case = namedtuple("Case", ["recipe", *USUAL], defaults=USUAL.values())
FIRST = agents(Merge(destinations="first"), Agents(destinations="first"))
BY_DISTANCE = {"noisy": True, "steps": 8}
CASES = {
    "paper": Case(AGENTSD),
    "agents, then keys": Case(AGENTS_THEN_KEYS),
    "downsampled keys": Case(TODO),
    "k 0": Case(paper(ratio=0.5, k=0.0)),
    "k 0.15": Case(paper(ratio=0.5, k=0.15)),
    "scale -0.5": Case(paper(ratio=0.5, scale=-0.5)),
    "early 0.8": Case(paper(ratio=0.5, early_frac=0.8)),
    "early 1": Case(paper(ratio=0.5, early_frac=1.0)),
    "ratio 0": Case(paper(ratio=0.0)),
    "merge in every step": Case(Recipe(MERGE, levels=1)),
    "merge later": Case(agents(Merge())),
    "late ratio": Case(paper(Merge(0.25, ranking="layer"), ratio=0.5)),
    "baseline later": Case(agents(None)),
    "agents later": Case(Recipe(Agents(**PAPER), levels=1)),
    "one level": Case(agents(levels=1)),
    "few agents": Case(agents(early=Agents(stride=2, at_most=9))),
    "few agents, paper": Case(paper(stride=2, at_most=9, agent_ratio=None)),
    "agent ratio": Case(paper(agent_ratio=0.8)),
    "strides": Case(paper(Merge(0.3, stride=4, ranking="layer"), stride=2, ratio=0.3)),
    "first cells": Case(FIRST),
    "random cells, odd batch": Case(agents(early=Agents(destinations="random")), batch=1),
    "odd batch": Case(FIRST, batch=3),
    "odd grid": Case(agents(Merge()), grid=(15, 13)),
    "seed 3": Case(agents(seed=3)),
    "bounds": Case(agents(early=Agents(0.6, destinations="first")), grid=(100, 100), steps=2, batch=1),
    "pooled agents": Case(Recipe(Phases(*pooled(None), None), levels=1)),
    "pooled agents of merged tokens": Case(agents(early=PooledAgents(12, ratio=0.4, **POOLED))),
    "mediators": Case(mediators(*pooled(4, 16, 64)), **BY_DISTANCE),
    "mediators, some of none": Case(mediators(None, *pooled(4, 16)), **BY_DISTANCE),
    "merged agents by distance": Case(
        mediators(*(Agents(0.2, stride=2, at_most=n, ranking="layer") for n in (4, 16, 64))), **BY_DISTANCE
    ),
    "agent module": Case(Recipe(AgentModule())),
    "focused": Case(Recipe(FocusedLinear())),
    "attnzero": Case(agents(early=AttnZero())),
    "SDXL": Case(AGENTS_THEN_KEYS, unet=make_sdxl_unet),
}


@torch.no_grad()
def run(case):
    """Denoise from a fixed start: the last latents."""
    kind = DDPMScheduler if case.noisy else DDIMScheduler
    host = Host(case.unet(), kind(**BETAS, clip_sample=False))
    apply_agentsd(host, recipe=case.recipe)
    rng = torch.Generator().manual_seed(0)
    latents = torch.randn(case.batch, 4, *case.grid, generator=rng)
    text = torch.randn(case.batch, 7, WIDTH, generator=rng)
    host.scheduler.set_timesteps(case.steps)
    for t in host.scheduler.timesteps:
        noise = host.unet(latents, t, text).sample
        latents = host.scheduler.step(noise, t, latents, generator=rng).prev_sample
    return latents


@pytest.mark.parametrize("name", CASES)
def test_the_latents_are_those_recorded(name):
    torch.testing.assert_close(run(CASES[name]), RECORDED[name], atol=1e-4, rtol=1e-5)
