"""Other processes give the same images; run as a script, this file is one of several that share seeds."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate import PartialState
from callers import Guided, outputs
from recipes import AGENTS_THEN_KEYS
from tiny import make_unet

from agentsd import Recipe, ResidualSharing, StepCache, apply_agentsd

RECIPE = Recipe(AGENTS_THEN_KEYS.attention, residual=ResidualSharing(2), steps=StepCache(2))


def main(folder):
    """Write the images of this process's share of the seeds as `SEED-PROCESS.pt`."""
    state, unet = PartialState(cpu=True), make_unet()
    apply_agentsd(unet, recipe=RECIPE)
    with state.split_between_processes([0, 1, 2, 3]) as seeds:
        for seed in seeds:
            image = torch.stack(outputs(unet, Guided(9, seed=seed)))
            torch.save(image, Path(folder) / f"{seed}-{state.process_index}.pt")
    if state.num_processes > 1:
        state.destroy_process_group()


@pytest.mark.slow
def test_processes_give_the_images_of_this_one(tmp_path):
    """Two by accelerate (gloo here, NCCL on GPUs), with other hashes."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", __file__, tmp_path]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "1"}
    subprocess.run([sys.executable, *launch], check=True, env=environment)
    files = sorted(tmp_path.iterdir())
    assert {file.stem.split("-")[1] for file in files} == {"0", "1"}
    apply_agentsd(unet := make_unet(), recipe=RECIPE)
    for seed in range(4):
        [made] = [torch.load(file) for file in files if file.stem.startswith(f"{seed}-")]
        assert torch.equal(made, torch.stack(outputs(unet, Guided(9, seed=seed))))


if __name__ == "__main__":
    main(sys.argv[1])
