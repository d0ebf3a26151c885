"""The studies outside of the wheel: each still runs, and its core agrees with an oracle."""

import numpy as np
import pytest
import torch
from agentsd_eval.research import metric_validation
from agentsd_eval.research.__main__ import main
from agentsd_eval.research.gpu import Campaign
from agentsd_eval.research.settings import GpuSettings
from commands import invoke, rows_of
from rich.console import Console


@pytest.mark.slow
def test_metric_validation(model_folder, photographs, tmp_path):
    (tmp_path / "prompts.txt").write_text("a cat\na dog\n")
    invoke(
        "metric-validation", "--model", model_folder, "--prompts", tmp_path / "prompts.txt", "--reference",
        photographs, "--steps", 4, "--reference-steps", 6, "--chain-steps", 4, "--chain-steps", 2,
        "--images", 4, "--out", tmp_path / "out", program=main,
    )  # fmt: skip
    pairs = rows_of(tmp_path / "out" / "metric-validation.jsonl")
    assert {pair["chain"] for pair in pairs} == {"steps", "tomesd", "DeepCache", "blur", "noise"}
    blurred = [pair for pair in pairs if (pair["chain"], pair["measure"]) == ("blur", "to the baseline")]
    assert [pair["verdict"] for pair in blurred] == ["fewer than 30 images"] * 2  # of four


@pytest.mark.parametrize(
    ("factor", "verdict"), [(2.0, "seen"), (0.5, "out of order"), (1.0, "not told apart")]
)
def test_a_ratio_is_seen_beyond_its_interval(factor, verdict):
    rng = np.random.default_rng(0)
    less = np.exp(rng.normal(0, 2, 40))  # seeds differ far more than the degradations do
    assert metric_validation.ratio(less, less * factor * np.exp(rng.normal(0, 0.1, 40))).verdict == verdict


def test_a_stage_that_fails_or_does_not_fit_costs_no_other(tmp_path):
    settings = GpuSettings(device="cpu", tiny=True, seconds=100, out=tmp_path)
    campaign = Campaign(settings, torch.device("cpu"), Console(quiet=True))
    campaign.stage("one", 5, lambda name: 1 / 0)
    campaign.stage("two", 500, lambda name: campaign.note(name, ran=True))
    campaign.stage("three", 5, lambda name: campaign.note(name, ran=True))
    failed, left_out, ran, end = rows_of(tmp_path / "gpu.jsonl")
    assert failed["failed"].startswith("ZeroDivisionError")
    assert "s left of 500" in left_out["left_out"]
    assert (ran["ran"], ran["stage"], end["stage"]) == (True, "three", "three")
