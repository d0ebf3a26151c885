"""Images that must not change: tiny runs under every kind of settings of commit b2348a6.

`python tests/recordings.py` runs them at that commit and in this tree, one after the other on one machine,
and prints how far each lies apart.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import DDIMScheduler, DDPMScheduler
from safetensors.torch import load_file, save_file
from tiny import BETAS, WIDTH, make_sdxl_unet, make_unet
from torch import Tensor

COMMIT = "b2348a6"
FILE = Path(__file__).with_name("recordings.safetensors")


@dataclass(frozen=True)
class Case:
    """A run: what `apply_agentsd` of that commit is given, and on what."""

    old: dict[str, Any]
    grid: tuple[int, int] = (16, 16)
    batch: int = 2
    steps: int = 5
    noisy: bool = False
    unet: Callable[[], Any] = make_unet


_MEDIATORS = {"schedule": "distance", "thresholds": (0.98, 0.9), "mode": "exact"}
_HALF = {"mode": "exact", "ratio": 0.5}

CASES: dict[str, Case] = {
    "paper": Case({"mode": "exact"}),
    "agents, then keys": Case({}),
    "downsampled keys": Case({"early": "downsample", "late": "downsample"}),
    "k 0": Case(_HALF | {"k": 0.0}),
    "k 0.15": Case(_HALF | {"k": 0.15}),
    "scale -0.5": Case(_HALF | {"scale": -0.5}),
    "early 0.8": Case(_HALF | {"early_frac": 0.8}),
    "early 1": Case(_HALF | {"early_frac": 1.0}),
    "ratio 0": Case({"mode": "exact", "ratio": 0.0}),
    "merge in every step": Case({"mode": "exact", "early": "tome", "late": "tome"}),
    "merge later": Case({"late": "tome"}),
    "late ratio": Case({"mode": "exact", "ratio": 0.5, "late_ratio": 0.25}),
    "baseline later": Case({"late": "none"}),
    "agents later": Case({"mode": "exact", "late": "agent"}),
    "one level": Case({"levels": 1}),
    "few agents": Case({"agent_counts": (9,)}),
    "few agents, paper": Case({"mode": "exact", "agent_counts": (9,)}),
    "agent ratio": Case({"mode": "exact", "agent_ratio": 0.8}),
    "strides": Case({"mode": "exact", "early_stride": 2, "late_stride": 4, "ratio": 0.3}),
    "first cells": Case({"destinations": "first", "late": "tome"}),
    "random cells, odd batch": Case({"destinations": "random"}, batch=1),
    "odd batch": Case({"late": "tome"}, batch=3),
    "odd grid": Case({"late": "tome"}, grid=(15, 13)),
    "seed 3": Case({"seed": 3}),
    "bounds": Case({"ratio": 0.6}, grid=(100, 100), steps=2, batch=1),
    "pooled agents": Case({"mode": "exact", "agents": "pool", "ratio": 0.0, "late": "none"}),
    "pooled agents of merged tokens": Case({"agents": "pool", "agent_counts": (12,)}),
    "mediators": Case(
        _MEDIATORS | {"agents": "pool", "ratio": 0.0, "agent_counts": (4, 16, 64)}, noisy=True, steps=8
    ),
    "mediators, some of none": Case(
        _MEDIATORS | {"agents": "pool", "ratio": 0.0, "agent_counts": (0, 4, 16)}, noisy=True, steps=8
    ),
    "merged agents by distance": Case(
        _MEDIATORS | {"agent_counts": (4, 16, 64), "ratio": 0.2}, noisy=True, steps=8
    ),
    "agent module": Case({"attention": "module", "early_frac": 1.0}),
    "focused": Case({"attention": "focused", "early_frac": 1.0, "parts": ("convolution",)}),
    "attnzero": Case({"attention": "attnzero", "early_frac": 0.4}),
    "SDXL": Case({}, unet=make_sdxl_unet),
}


class Pipe:
    """All of a pipeline that a patch reads."""

    def __init__(self, unet: Any, scheduler: Any) -> None:
        self.unet, self.scheduler = unet, scheduler


@torch.no_grad()
def run(case: Case, apply: Callable[[Any, Case], object]) -> Tensor:
    """Denoise from a fixed start under what `apply` does to a pipeline: the last latents."""
    unet = case.unet()
    pipe = Pipe(unet, (DDPMScheduler if case.noisy else DDIMScheduler)(**BETAS, clip_sample=False))
    apply(pipe, case)
    rng = torch.Generator().manual_seed(0)
    latents = torch.randn(case.batch, 4, *case.grid, generator=rng)
    text = torch.randn(case.batch, 7, WIDTH, generator=rng)
    pipe.scheduler.set_timesteps(case.steps)
    for t in pipe.scheduler.timesteps:
        noise = unet(latents, t, text).sample
        latents = pipe.scheduler.step(noise, t, latents, generator=rng).prev_sample
    return latents


def apply_old(pipe: Any, case: Case) -> None:
    """What `apply_agentsd` of that commit does; imported there alone."""
    import agentsd

    agentsd.apply_agentsd(pipe, **case.old)


def main() -> None:
    """Run every case at the commit and here, and print the greatest difference of each."""
    torch.set_num_threads(1)
    if len(sys.argv) == 2:  # at the commit
        save_file({name: run(case, apply_old) for name, case in CASES.items()}, sys.argv[1])
        return
    from test_recordings import RECIPES, apply

    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(["git", "archive", COMMIT], check=True, capture_output=True).stdout
        subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)
        made = Path(folder) / "made.safetensors"
        environment = os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{Path(__file__).parent}"}
        subprocess.run([sys.executable, __file__, str(made)], env=environment, check=True)
        before = load_file(made)
    for name, case in CASES.items():
        after = run(case, lambda pipe, case, name=name: apply(pipe, RECIPES[name]))
        moved = (after - before[name]).abs().max().item()
        said = (
            "the same bits" if torch.equal(after, before[name]) else f"{moved:.1e} of {after.abs().max():.0f}"
        )
        print(f"{name:32s} {said}")


if __name__ == "__main__":
    main()
