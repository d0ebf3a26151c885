"""How far a reader goes to follow one call: the files it passes through, and the moves between them."""

import re
import sys
from dataclasses import replace
from pathlib import Path

import diffusers
import pytest
import torch
from callers import Host, inputs
from recipes import AGENTS_CACHED
from tiny import BETAS, make_unet

import agentsd
from agentsd import apply_agentsd
from agentsd.recipe import FAST

PACKAGE = Path(agentsd.__file__).parent
FILES, MOVES = 10, {"fast": 33, "agents": 40}
OPERATOR = {f"attention/{name}.py" for name in ("agents", "formula", "merging", "operator", "ranking")}
"""The arithmetic of merged agents."""


def path_of(work):
    """The package's files that run in it, and how often one is entered from another, or from the host."""
    files, moves = set(), 0

    def follow(frame, event, arg):
        nonlocal moves
        inside = frame.f_code.co_filename
        if event != "call" or not inside.startswith(str(PACKAGE)):
            return
        caller = frame.f_back
        while caller is not None and not caller.f_code.co_filename.startswith(str(PACKAGE)):
            caller = caller.f_back
        files.add(Path(inside).relative_to(PACKAGE).as_posix())
        moves += caller is None or caller.f_code.co_filename != inside

    sys.setprofile(follow)
    try:
        work()
    finally:
        sys.setprofile(None)
    return files, moves


def path_of_a_cached_call(recipe):
    """Of the second of a run's cached calls, guided, under DPM-Solver++."""
    scheduler = diffusers.DPMSolverMultistepScheduler(**BETAS, use_karras_sigmas=True)
    scheduler.set_timesteps(12)
    unet, (latent, text), paths = make_unet(), inputs(), []
    with torch.no_grad(), apply_agentsd(host := Host(unet, scheduler), recipe=recipe) as handle:
        for t in host.scheduler.timesteps:
            paths.append(path_of(lambda t=t: scheduler.step(unet(latent, t, text).sample, t, latent)))
        letters = handle.summary().split()[0]
    return paths[letters.index("f", letters.index("f") + 1)]


def everywhere(recipe):
    """The recipe with its residuals shared on the toy's grid, too."""
    return replace(recipe, residual=replace(recipe.residual, least_tokens=0))


AGENTS = everywhere(AGENTS_CACHED).with_settings(early_frac=1.0)


@pytest.mark.parametrize(("name", "recipe"), [("fast", everywhere(FAST)), ("agents", AGENTS)])
def test_a_cached_call(name, recipe):
    """One with agents has their arithmetic besides; CONTRIBUTING's drawing names the files."""
    files, moves = path_of_a_cached_call(recipe)
    assert (files >= OPERATOR) == (recipe is AGENTS)
    assert len(files - OPERATOR if recipe is AGENTS else files) <= FILES, files
    assert moves <= MOVES[name]
    page = (PACKAGE.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    drawn = page.split("## Architecture")[1].split("\n## ")[0]
    named = set(re.findall(r"`(?:attention/)?(\w+)\.py`", drawn))
    assert {Path(file).stem for file in files} - {"operator", "downsample"} <= named
