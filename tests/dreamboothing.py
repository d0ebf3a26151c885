"""Short DreamBooth runs, and what they leave."""

from pathlib import Path

import numpy as np
import torch
from accelerate.state import AcceleratorState
from click.testing import CliRunner
from diffusers import DDIMScheduler
from safetensors.torch import load_file

from agentsd.dreambooth.checkpoints import list_checkpoints
from agentsd.dreambooth.cli import dreambooth
from agentsd.dreambooth.training import Run


def start(config):
    """A run before its first step; accelerate would keep the precision of the one before."""
    AcceleratorState._reset_state(reset_partial_state=True)
    return Run(config)


def train(config):
    """The output folder of a whole run."""
    return start(config).train()


def run_command(options, code=0, command=dreambooth):
    """What the command prints, which ends with that exit code."""
    AcceleratorState._reset_state(reset_partial_state=True)
    result = CliRunner().invoke(command, options)
    assert result.exit_code == code, (result.output, result.exception)
    assert code == 0 or isinstance(result.exception, SystemExit)
    return result.output


def weights(folder, part="unet"):
    """The weights of a saved pipeline's U-Net, or of another part, as they are in the file."""
    [path] = Path(folder, part).glob("*.safetensors")
    return load_file(path)


def equal(a, b):
    """Whether two sets of weights are the same to the bit."""
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def checkpoints_in(folder):
    """Names of the whole checkpoints, oldest first."""
    return [path.name for path in list_checkpoints(folder)]


def drawn_by(pipe, prompt="a sks cat", seed=0):
    """An image as diffusers' own pipeline draws it in two DDIM steps."""
    pipe.scheduler = DDIMScheduler.from_config(pipe.scheduler.config, clip_sample=False)
    rng = torch.Generator().manual_seed(seed)
    [image] = pipe(prompt, num_inference_steps=2, guidance_scale=7.5, generator=rng).images
    return np.asarray(image)
