"""Figures of a row from figures of its images, and a table of the toy model."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import numpy as np
import pytest
from agentsd_eval.cli import main
from agentsd_eval.pages.quality_table import change
from agentsd_eval.quality.gain import cost_at
from agentsd_eval.quality.summary import summary_of
from agentsd_eval.studies import table
from click.testing import CliRunner


def test_means_and_paired_changes() -> None:
    baseline = [{"clip": 30}, {"clip": 20}, {"clip": 10}]
    ours = [{"clip": 31, "psnr": 40}, {"clip": 20, "psnr": 50}, {"clip": 9, "psnr": 60}]
    row = summary_of(ours, baseline)
    assert (row["clip"], row["clip_change"], row["psnr"]) == (20.0, 0.0, 50.0)
    assert row["clip_change_error"] == pytest.approx(3**-0.5)  # changes 1, 0, -1
    assert "clip_change" not in summary_of(baseline, None)
    assert summary_of([{}], None) == {}


def test_perceptual_distances_are_geometric_means() -> None:
    row = summary_of([{"baseline_distance": x} for x in (0.01, 0.1, 1.0)], None)
    assert row["baseline_distance"] == pytest.approx(0.1)


def row(key: str, macs: float, speedup: float) -> dict:
    return {"method": key, "key": key, "macs": macs, "speedup": speedup}


def test_worth_is_what_fewer_steps_cost_at_the_distance_over_the_own_cost() -> None:
    rows = [row("baseline", 100, 1.0), row("baseline@12", 50, 2.0), row("quick", 50, 1.6)]
    distances = {"baseline": 0.1, "baseline@12": 0.2, "quick": 0.1}
    singles = [{"method": k, "reference_distance": d * s} for k, d in distances.items() for s in (1, 2, 3)]
    table.add_gain(rows, singles)
    assert rows[2]["gain_macs"] == pytest.approx(2.0)
    assert rows[2]["gain_seconds"] == pytest.approx(1.6)
    assert rows[2]["gain_seconds_beyond"] is None
    assert "gain_seconds" not in rows[0]


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (-1.0, 0.3, "-1.00 ± 0.61"),
        (0.5, 0.3, "+0.50 ± 0.61 ≈"),
        (0.5, None, "-"),
        (None, None, "-"),
    ],
)
def test_a_change_inside_the_noise_is_marked(value: float | None, error: float | None, text: str) -> None:
    assert change("fd", ".2f")({"fd_change": value, "fd_change_error": error}) == text


@pytest.mark.parametrize(("images", "text"), [(29, "too few to judge"), (30, "-1.00 ± 0.61")])
def test_below_30_images_nothing_is_judged(images: int, text: str) -> None:
    row = {"clip_change": -1.0, "clip_change_error": 0.3, "images": images}
    assert change("clip", ".2f")(row) == text


def test_a_table_of_the_toy_model(tmp_path: Path) -> None:
    options = {
        "methods": "agentsd", "steps": 6, "images": 3, "fewer-steps": 0.5, "samplers": "none",
        "reference-steps": 12, "references": 16, "out": tmp_path,
    }  # fmt: skip
    words = [str(word) for key, value in options.items() for word in (f"--{key}", value)]
    result = CliRunner().invoke(main, ["table", *words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    baseline, fewer, agent, floor = map(json.loads, (tmp_path / "table.jsonl").read_text().splitlines())
    assert 0 < baseline["reference_distance"] < fewer["reference_distance"]
    assert 0 < agent["baseline_distance"] < fewer["baseline_distance"]
    assert "baseline_distance" not in baseline
    assert agent["gain_seconds"] > 0 < agent["gain_macs"]
    assert floor["kid"] < baseline["kid"]
    assert floor["images"] == 3
    run = json.loads((tmp_path / "run.json").read_text())
    assert run["results"]["table"]["command"] == shlex.join(["agentsd-eval", "table", *words])
    assert {row["macs"] for row in run["costs"].values()} == {row["macs"] for row in (baseline, fewer, agent)}


def test_gain_over_the_best_plain_sampler_is_against_the_lower_envelope() -> None:
    """By hand: at a distance of .2 the own sampler costs 50 and the other one 40; at .1, 100 and 80."""
    own = [row("baseline", 100, 1.0), row("baseline@12", 50, 2.0)]
    other = [
        row(name, macs, 100 / macs) | {"sampler": "b"}
        for name, macs in (("baseline@20/b", 80), ("baseline@10/b", 40))
    ]
    quick = [row("quick", 20, 5.0), row("quick/b", 20, 5.0) | {"sampler": "b"}]
    rows = [*own, *other, *quick]
    distances = (0.1, 0.2, 0.1, 0.2, 0.2, 0.1)
    singles = [
        {"method": one["key"], "reference_distance": distance * factor}
        for one, distance in zip(rows, distances, strict=True)
        for factor in (1, 2, 3)
    ]
    table.add_gain(rows, singles)
    assert [rows[i]["gain_macs"] for i in (4, 5)] == pytest.approx([50 / 20, 80 / 20])
    assert [rows[i]["gain_best_macs"] for i in (4, 5)] == pytest.approx([40 / 20, 80 / 20])
    assert rows[4]["gain_best_seconds"] == pytest.approx(2.0)
    assert [rows[i]["gain_best_macs"] for i in (0, 1)] == pytest.approx([0.8, 0.8])  # swap the sampler
    assert all("gain_macs" not in one for one in (*own, *other))
    for worse_first in (1, -1):  # of two that cost the same the nearer one counts, whichever comes first
        costs = np.array([100.0, 50, 100, 50])[::worse_first]
        assert cost_at(0.15, costs, np.array([0.2, 0.3, 0.1, 0.2])[::worse_first]) == pytest.approx(
            50 * 2 ** (np.log(0.2 / 0.15) / np.log(2))
        )
    alone = [row("baseline", 100, 1.0), row("baseline@12", 50, 2.0), row("quick", 20, 5.0)]
    table.add_gain(alone, [one for one in singles if not one["method"].endswith("/b")])
    assert "gain_macs" in alone[2]
    assert not any("gain_best_macs" in one for one in alone)
