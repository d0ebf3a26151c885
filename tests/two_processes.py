"""Images of this process's share of the seeds, written to a folder: what `test_two_processes.py` launches."""

import sys
from pathlib import Path

import torch
from accelerate import PartialState
from callers import Guided
from recipes import AGENTS_THEN_KEYS
from tiny import make_unet

from agentsd import Recipe, ResidualSharing, StepCache, apply_agentsd

RECIPE = Recipe(AGENTS_THEN_KEYS.attention, residual=ResidualSharing(2), steps=StepCache(2))


def main(folder: str) -> None:
    """Write `SEED-PROCESS.pt` for each seed."""
    state, unet = PartialState(cpu=True), make_unet()
    apply_agentsd(unet, recipe=RECIPE)
    with state.split_between_processes([0, 1, 2, 3]) as seeds:
        for seed in seeds:
            caller = Guided(9, seed=seed)
            image = torch.stack([caller(unet, i) for i in range(9)])
            torch.save(image, Path(folder) / f"{seed}-{state.process_index}.pt")
    if state.num_processes > 1:
        state.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
