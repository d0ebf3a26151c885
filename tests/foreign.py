"""A run of a U-Net that others have changed, and the recipes it is run with."""

import torch
from callers import Caller

from agentsd import Agents, Downsample, Recipe, ResidualSharing, StepCache
from agentsd.recipe import MODES

STEPS = 12
LORA = {"r": 2, "target_modules": ["to_q", "to_v"], "init_lora_weights": False}
RECIPES = {
    **MODES,
    "residuals": Recipe(Downsample(), residual=ResidualSharing(), steps=StepCache(2)),
    "agents": Recipe(Agents()),
}


def run(unet, caller=None, after=lambda i: None, **more):
    """The outputs of a run's calls."""
    caller, outputs = caller or Caller(STEPS), []
    for i in range(STEPS):
        outputs.append(caller(unet, i, **more))
        after(i)
    return outputs


def equal(made, expected):
    return all(map(torch.equal, made, expected))
