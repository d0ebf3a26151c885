"""Two processes by accelerate (gloo here, NCCL on GPUs) give the images of one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).with_name("two_processes.py")


@pytest.mark.slow
def test_two_processes_give_the_images_of_one(tmp_path):
    images = []
    for count in (1, 2):
        folder = tmp_path / str(count)
        folder.mkdir()
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(count)]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        subprocess.run([sys.executable, *launch, SCRIPT, folder], check=True, env=environment)
        files = sorted(folder.iterdir())
        assert {file.stem.split("-")[1] for file in files} == {str(process) for process in range(count)}
        images.append([torch.load(file) for file in files])
    assert len(images[0]) == 4
    assert all(map(torch.equal, *images))
