"""The studies outside of the wheel: each still runs, and its core agrees with an oracle."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from agentsd_demo.scenes import random_scene, triples
from agentsd_eval.research import breakdown, mediators, metric_validation, redundancy
from agentsd_eval.research.__main__ import main
from agentsd_eval.research.divergence import attention_map, js_score, js_score_sampled
from agentsd_eval.research.gpu import Campaign
from agentsd_eval.research.scene_details import high_frequency_energy, position_distance, wasserstein
from agentsd_eval.research.settings import GpuSettings, MediatorSettings, ProfileSettings, RedundancySettings
from click.testing import CliRunner
from PIL import Image
from rich.console import Console
from sd_folder import stand_in_for_inception
from tiny import fingerprint


def invoke(*arguments: Any) -> str:
    """Run a study; return what it printed."""
    result = CliRunner().invoke(main, list(map(str, arguments)), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    (tmp_path / "prompts.txt").write_text("a cat\na dog\n")
    return tmp_path / "prompts.txt"


def test_metric_validation(model_folder: str, photographs: Path, prompts: Path, tmp_path: Path) -> None:
    invoke(
        "metric-validation", "--model", model_folder, "--prompts", prompts, "--reference", photographs,
        "--steps", 4, "--reference-steps", 6, "--chain-steps", 4, "--chain-steps", 2, "--images", 4,
        "--out", tmp_path / "out",
    )  # fmt: skip
    pairs = rows_of(tmp_path / "out" / "metric-validation.jsonl")
    assert {pair["chain"] for pair in pairs} == {"steps", "tomesd", "DeepCache", "blur", "noise"}
    blurred = [pair for pair in pairs if (pair["chain"], pair["measure"]) == ("blur", "to the baseline")]
    assert [pair["verdict"] for pair in blurred] == ["seen", "seen"]


@pytest.mark.parametrize(
    ("factor", "verdict"), [(2.0, "seen"), (0.5, "out of order"), (1.0, "not told apart")]
)
def test_a_ratio_is_seen_beyond_its_interval(factor: float, verdict: str) -> None:
    rng = np.random.default_rng(0)
    less = np.exp(rng.normal(0, 2, 40))  # seeds differ far more than the degradations do
    assert metric_validation.ratio(less, less * factor * np.exp(rng.normal(0, 0.1, 40))).verdict == verdict


def test_mediators(model_folder: str, photographs: Path, prompts: Path, tmp_path: Path) -> None:
    invoke(
        "mediators", "--model", model_folder, "--prompts", prompts, "--reference", photographs, "--images", 2,
        "--steps", 2, "--counts", 4, "--counts", 16, "--threshold-step", 1, "--out", tmp_path / "run",
    )  # fmt: skip
    assert (tmp_path / "run" / "mediators.png").exists()
    assert "| thresholds 1 |" in (tmp_path / "run" / "mediators.md").read_text()


def test_thresholds_fall() -> None:
    assert len(set(mediators.thresholds_of(3, 0.1))) == 66  # as in the paper: 11 + 10 + ... + 1
    methods = mediators.methods_of(MediatorSettings(counts=(4, 16), threshold_step=0.5))
    assert [m.name for m in methods if m.parts] == ["mediators 1", "mediators 0.5", "mediators 0"]


def test_redundancy(model_folder: str, tmp_path: Path) -> None:
    printed = invoke(
        "redundancy", "--model", model_folder, "--prompt", "a cat", "--steps", 3, "--measured-steps", 2,
        "--exact-tokens", 100, "--pairs", 64, "--out", tmp_path,
    )  # fmt: skip
    assert "level 1 (256 tokens)" in printed
    rows = rows_of(tmp_path / "redundancy.jsonl")
    assert {row["pairs"] for row in rows if row["tokens"] == 256} == {"sampled"}
    assert all(0 <= row["score"] <= math.log(2) for row in rows)
    assert Image.open(tmp_path / "redundancy.png").width == 1200


def test_watching_redundancy_leaves_the_pipeline_as_it_was(pipe: Any, sample: Any) -> None:
    before, baseline = fingerprint(pipe.unet), sample(pipe)
    settings = RedundancySettings(steps=4, measured_steps=2, scheduler="model")
    with redundancy.scored(pipe.unet, {0}, settings, torch.Generator()):
        assert torch.equal(sample(pipe), baseline)
    assert fingerprint(pipe.unet) == before


def loop_score(attention: torch.Tensor) -> float:
    """Eq. 4 to 6 to the letter: every head, every pair, Kullback-Leibler divergences in float64."""

    def kl(p: torch.Tensor, m: torch.Tensor) -> float:
        kept = p > 0
        return float((p[kept] * (p[kept].log() - m[kept].log())).sum())

    heads, tokens, _ = attention.shape
    total = 0.0
    for head in attention.double():
        for i in range(tokens - 1):
            for j in range(i + 1, tokens):
                mixed = (head[i] + head[j]) / 2
                total += (kl(head[i], mixed) + kl(head[j], mixed)) / 2
    return 2 * total / (heads * tokens * (tokens - 1))


@pytest.mark.parametrize("width", [0.01, 3.0, 30.0])
def test_the_score_is_the_mean_over_all_pairs_and_sampling_is_near_it(width: float) -> None:
    query, key = torch.randn(2, 3, 24, 8, generator=torch.Generator().manual_seed(0))
    attention = attention_map(query * width, key)
    exact = loop_score(attention)
    assert js_score(attention) == pytest.approx(exact, abs=5e-7)
    mean, error = js_score_sampled(query * width, key, 500, torch.Generator().manual_seed(0))
    assert abs(mean - exact) < 4 * error


def test_the_profile_has_parts_that_add_up(pipe: Any) -> None:
    settings = ProfileSettings(methods=("agentsd", "no-attention"), repeats=1, ratio=0.5)
    methods, cases = breakdown.methods_of(settings), breakdown.cases_of(settings, pipe)
    before = fingerprint(pipe.unet)
    early, late = breakdown.measure(pipe, cases, methods, settings, lambda: None)
    assert fingerprint(pipe.unet) == before
    for rows in (early, late):
        for method in methods:
            parts = sum(row[method.label] for row in rows[:-1])
            assert parts == pytest.approx(rows[-1][method.label])
    matching = next(row for row in early if row["part"] == "matching: rank")
    assert matching["baseline"] == matching["no-attention"] == 0 < matching["agentsd r=0.5"]


def test_the_profile_is_written(model_folder: str, tmp_path: Path) -> None:
    invoke(
        "profile", "--model", model_folder, "--methods", "agentsd", "--phases", "early", "--repeats", 1,
        "--out", tmp_path,
    )  # fmt: skip
    assert rows_of(tmp_path / "profile.jsonl")[-1]["part"] == "whole call"


def test_fid_of_two_folders(photographs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in_for_inception(monkeypatch)
    assert "FID" in invoke("fid", photographs, photographs, "--cache", tmp_path)
    printed = invoke("fid", photographs, photographs, "--features", "efficientnet-lite0", "--cache", tmp_path)
    assert "9 / 9" in printed


def test_details_of_a_table(tmp_path: Path) -> None:
    results = tmp_path / "run"
    scenes = [(triple, i) for i, triple in enumerate(triples()[:4])]
    folder = results / "images" / "baseline-sdpa"
    folder.mkdir(parents=True)
    lines = ["method,index,seed,prompt"]
    for triple, i in scenes:
        random_scene(f"a/{i}", 64, among=[triple]).image.save(folder / f"{i:05d}.png")
        lines.append(f"baseline-sdpa,{i},{i},{triple.caption}")
    shutil.copytree(folder, results / "images" / "other-sdpa")
    lines += [line.replace("baseline", "other") for line in lines[1:]]
    (results / "table-images.csv").write_text("\n".join(lines))
    keys = [{"key": f"{name}-sdpa", "label": name} for name in ("baseline", "other")]
    (results / "table.jsonl").write_text("\n".join(map(json.dumps, keys)))
    invoke("details", results)
    baseline, other = rows_of(results / "details.jsonl")
    assert baseline["high_frequency"] == other["high_frequency"] == 1
    assert baseline["position"] == other["position"] > 0
    assert 0 <= baseline["right_style"] <= 1


def test_high_frequency_energy_is_a_fine_waves_power() -> None:
    def wave(cycles_a_pixel: float) -> Image.Image:
        values = 128 + 40 * np.cos(2 * np.pi * cycles_a_pixel * np.arange(64))[None, :] * np.ones((64, 1))
        return Image.fromarray(np.repeat(values.round().astype(np.uint8)[..., None], 3, axis=2))

    assert high_frequency_energy(wave(0.375)) == pytest.approx(40**2 / 2, rel=0.02)
    assert high_frequency_energy(wave(0.125)) < 1


@pytest.mark.parametrize("sizes", [(7, 7), (5, 12)])
def test_wasserstein_is_the_area_between_the_quantile_functions(sizes: tuple[int, int]) -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.normal(i, 1 + i, size) for i, size in enumerate(sizes))
    grid = (np.arange(200_000) + 0.5) / 200_000
    quantile = [np.sort(s)[(grid * len(s)).astype(int)] for s in (a, b)]
    assert wasserstein(a, b) == pytest.approx(np.abs(quantile[0] - quantile[1]).mean(), rel=1e-3)
    points = rng.normal(size=(9, 3))
    assert position_distance(points, points + 2.5) == (pytest.approx(2.5), pytest.approx(2.5))


def test_a_stage_that_fails_or_does_not_fit_costs_no_other(tmp_path: Path) -> None:
    settings = GpuSettings(device="cpu", tiny=True, seconds=100, out=tmp_path)
    campaign = Campaign(settings, torch.device("cpu"), Console(quiet=True))
    campaign.stage("one", 5, lambda name: 1 / 0)
    campaign.stage("two", 500, lambda name: campaign.note(name, ran=True))
    campaign.stage("three", 5, lambda name: campaign.note(name, ran=True))
    rows = [json.loads(line) for line in (tmp_path / "gpu.jsonl").read_text().splitlines()]
    assert [row["stage"] for row in rows] == ["one", "two", "three", "three"]
    assert rows[0]["failed"].startswith("ZeroDivisionError")
    assert "s left of 500" in rows[1]["left_out"]
    assert rows[2]["ran"]
