"""What the tests of calibration share: settings, runs and their cost."""

from __future__ import annotations

import torch

from agentsd import Merge
from agentsd.calibration.cost import macs

STEPS = 8
SETTINGS = {"num_inference_steps": STEPS, "guidance_scale": 7.5}
MERGE = Merge(0.5, ranking="layer")
COUNTED = {
    "cost": "macs",
    "operators": (MERGE,),
    "held_out": ["a dog"],
    "reference_steps": 20,
} | SETTINGS


def run(pipe, prompt="a cat", seed=0, **changes):
    """The final latents and what the U-Net gave in each call."""
    outputs = []
    hook = pipe.unet.register_forward_hook(lambda m, args, out: outputs.append(out[0].clone()))
    rng = torch.Generator().manual_seed(seed)
    latents = pipe(prompt, generator=rng, output_type="latent", **SETTINGS | changes).images
    hook.remove()
    return latents, outputs


def distance(one, other):
    """Root mean square of the change, over the other's."""
    return float((one - other).double().norm() / other.double().norm())


def work(pipe, **changes):
    """MACs of the U-Net's calls in a run."""
    counts, host = [], pipe.unet.forward

    def counted(*args, **kwargs):
        outputs = []
        counts.append(macs(lambda: outputs.append(host(*args, **kwargs))))
        return outputs[0]

    pipe.unet.forward = counted
    run(pipe, **changes)
    del pipe.unet.forward
    return sum(counts)
