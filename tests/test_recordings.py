"""Images do not change: every kind of settings gives what it gave before the core was rebuilt."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from recipes import AGENTS_THEN_KEYS, TODO
from recordings import CASES, FILE, run
from safetensors.torch import load_file

from agentsd import Agents, ByDistance, Downsample, Merge, Phases, PooledAgents, Recipe, apply_agentsd
from agentsd.modules import AgentModule, AttnZero, FocusedLinear
from agentsd.recipe import AGENTSD

OLD = {"ranking": "layer", "at_most": None, "agent_ratio": 0.95}
"""Agents as in the paper's mode."""
OLD_MERGE = Merge(ranking="layer")


def _paper(late: Any = OLD_MERGE, early_frac: float = 0.4, **settings: Any) -> Recipe:
    """The paper's mode with other settings."""
    early = Agents(**OLD | settings)
    if late is OLD_MERGE and "ratio" in settings:
        late = replace(OLD_MERGE, ratio=settings["ratio"])
    return Recipe(Phases(early, late, early_frac), levels=1)


def _agents(late: Any = Downsample(), early: Any = Agents(), **more: Any) -> Recipe:  # noqa: B008
    """Agents, then downsampled keys, with other settings."""
    return Recipe(Phases(early, late), **more)


FORMULA = {"k": 0.075, "scale": -0.15}
"""AgentSD's."""


def _mediators(*stages: Any, thresholds: tuple[float, ...] = (0.98, 0.9)) -> Recipe:
    return Recipe(ByDistance(stages, thresholds), levels=1)


def _pooled(*counts: int) -> list[PooledAgents]:
    return [PooledAgents(count, at_most=None, **FORMULA) for count in counts]


RECIPES: dict[str, Recipe] = {
    "paper": AGENTSD,
    "agents, then keys": AGENTS_THEN_KEYS,
    "downsampled keys": TODO,
    "k 0": _paper(ratio=0.5, k=0.0),
    "k 0.15": _paper(ratio=0.5, k=0.15),
    "scale -0.5": _paper(ratio=0.5, scale=-0.5),
    "early 0.8": _paper(ratio=0.5, early_frac=0.8),
    "early 1": _paper(ratio=0.5, early_frac=1.0),
    "ratio 0": _paper(ratio=0.0),
    "merge in every step": Recipe(OLD_MERGE, levels=1),
    "merge later": _agents(Merge()),
    "late ratio": _paper(Merge(0.25, ranking="layer"), ratio=0.5),
    "baseline later": _agents(None),
    "agents later": Recipe(Agents(**OLD), levels=1),
    "one level": _agents(levels=1),
    "few agents": _agents(early=Agents(stride=2, at_most=9)),
    "few agents, paper": _paper(stride=2, at_most=9, agent_ratio=None),
    "agent ratio": _paper(agent_ratio=0.8),
    "strides": _paper(Merge(0.3, stride=4, ranking="layer"), stride=2, ratio=0.3),
    "first cells": _agents(Merge(destinations="first"), Agents(destinations="first")),
    "random cells, odd batch": _agents(early=Agents(destinations="random")),
    "odd batch": _agents(Merge(destinations="first"), Agents(destinations="first")),
    "odd grid": _agents(Merge()),
    "seed 3": _agents(seed=3),
    "bounds": _agents(early=Agents(0.6, destinations="first")),
    "pooled agents": Recipe(Phases(PooledAgents(at_most=None, **FORMULA), None), levels=1),
    "pooled agents of merged tokens": _agents(early=PooledAgents(12, ratio=0.4, **FORMULA)),
    "mediators": _mediators(*_pooled(4, 16, 64)),
    "mediators, some of none": _mediators(None, *_pooled(4, 16)),
    "merged agents by distance": _mediators(
        *(Agents(0.2, stride=2, at_most=n, ranking="layer") for n in (4, 16, 64))
    ),
    "agent module": Recipe(AgentModule()),
    "focused": Recipe(FocusedLinear()),
    "attnzero": _agents(early=AttnZero()),
    "SDXL": AGENTS_THEN_KEYS,
}


def apply(pipe: Any, recipe: Recipe) -> None:
    """Patch a pipeline."""
    apply_agentsd(pipe, recipe=recipe)


@pytest.mark.parametrize("name", CASES)
def test_the_latents_are_those_recorded(name):
    recorded = load_file(FILE)[name]
    latents = run(CASES[name], lambda pipe, case: apply(pipe, RECIPES[name]))
    torch.testing.assert_close(latents, recorded, atol=1e-4, rtol=1e-5)


def test_every_case_is_another_image():
    recorded = list(load_file(FILE).values())
    assert set(RECIPES) == set(CASES) == set(load_file(FILE))
    for i, one in enumerate(recorded):
        assert not any(torch.equal(one, other) for other in recorded[:i])
