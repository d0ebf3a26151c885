"""The commands for a machine with a GPU, on tiny shapes on the CPU: what they leave behind."""

import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import yaml
from commands import rows_of
from PIL import Image

ROOT = Path(__file__).parent.parent


def run(name, out, **environment):
    """A command, with this Python first on the path."""
    given = {name: str(value) for name, value in environment.items()}
    own = {"TINY": "1", "OUT": str(out), "TMPDIR": str(out.parent), "OMP_NUM_THREADS": "1"}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(
        ["bash", str(ROOT / ".ci/gpu" / name)], env=os.environ | own | given | {"PATH": path}, check=True
    )


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_first_command(tmp_path):
    """It fills its time, and ends in it on a busy machine, too; pytest finds no GPU, and says so."""
    run("first", tmp_path / "out", SECONDS_IN_ALL=400, BESIDE=200)
    rows = rows_of(tmp_path / "out" / "gpu.jsonl")
    assert not [row for row in rows if row.get("failed")]
    assert {"environment", "build", "tests", "training", "SDXL, runs"} <= {row["stage"] for row in rows}
    assert rows[-1]["stage"] == "end"
    tests = next(row for row in rows if row["stage"] == "tests")
    assert "skipped" in tests["last"][0]
    peaks = [row for row in rows if row["stage"] == "training" and "ratio" in row]
    assert [(row["ratio"], row["optimizer"]) for row in peaks] == [(0.4, "AdamW"), (0.0, "AdamW")]
    methods = {row["method"] for row in rows if row["stage"] == "SDXL, runs" and "seconds" in row}
    assert {"baseline", "baseline@17/unipckarras", "agentsd", "fast"} <= methods
    assert all(row["same_image"] for row in rows if "same_image" in row)
    assert (tmp_path / "out" / "versions.txt").read_text()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_second_command(tmp_path):
    """A few steps from the shipped weights: a pipeline in parts of a tar, a log, grids and accuracies."""
    recipe = yaml.safe_load((ROOT / "configs/demo_model_gpu.yaml").read_text())
    recipe["device"] = "cpu"
    recipe["diffusion"] |= {"batch": 2, "workers": 1, "steps": 3, "grid_every": 1000, "bf16": False}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    out = tmp_path / "out"
    run("second", out, MINUTES=5, SECONDS_A_SIZE=500, WORK=tmp_path / "work", CONFIG=tmp_path / "recipe.yaml")
    last = rows_of(out / "log.jsonl")[-1]
    assert last["step"] == 3
    assert last["images_per_s"] > 0
    parts = sorted(out.glob("pipeline.tar.*"))
    assert all(part.stat().st_size <= 15 << 20 for part in parts)
    (tmp_path / "whole.tar").write_bytes(b"".join(part.read_bytes() for part in parts))
    with tarfile.open(tmp_path / "whole.tar") as whole:
        assert "pipeline/model_index.json" in whole.getnames()
    text = (out / "accuracy.log").read_text()
    assert text.count("generated, ") == 3
    widths = {Image.open(path).size[0] for path in out.glob("seed_0_*.png")}
    assert widths == {8 * size for size in (32, 48, 64)}


@pytest.mark.slow
def test_the_third_command(tmp_path):
    """Three images a row, two of them of the round before."""
    run("third", tmp_path / "out", SECONDS_IN_ALL=900, WORK=tmp_path / "work")
    tables = list(map(rows_of, (tmp_path / "out").glob("*/table.jsonl")))
    assert len(tables) == 5
    assert "left out" not in (tmp_path / "out" / "third.log").read_text()
    for rows in tables:
        assert {row["images"] for row in rows} == {3}
        assert {"baseline", "fast"} <= {row["method"] for row in rows}
