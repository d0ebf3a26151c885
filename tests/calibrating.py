"""What the tests of calibration share: settings, runs and their cost."""

from agentsd_eval.cost.macs import macs
from callers import draw

from agentsd import Downsample, Recipe, ResidualSharing, StepCache

STEPS = 8
SETTINGS = {"num_inference_steps": STEPS, "guidance_scale": 7.5}
CANDIDATES = (
    Recipe(steps=StepCache(2)),
    Recipe(steps=StepCache(3)),
    Recipe(steps=StepCache(2, warmup_steps=4)),
    Recipe(Downsample(2, at_most=None), steps=StepCache(2), residual=ResidualSharing(1)),
    Recipe(Downsample(2, at_most=None), residual=ResidualSharing(2)),
)
COUNTED = {"held_out": ["a dog"], "reference_steps": 12, "candidates": CANDIDATES} | SETTINGS


def run(pipe, prompt="a cat", seed=0, **changes):
    return draw(pipe, seed, prompt=prompt, **SETTINGS | changes)


def distance(one, other):
    """Root mean square of the change, over the other's."""
    return float((one - other).double().norm() / other.double().norm())


def counted(pipe, *args, **changes):
    """The final latents of a run, and its MACs."""
    made = []
    count = macs(lambda: made.append(run(pipe, *args, **changes)))
    return made[0], count
