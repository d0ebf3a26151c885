"""Figures of a row from figures of its images, and the toy model's prompt accuracy."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from agentsd_eval.cli import main
from agentsd_eval.pages.quality_table import change, plan
from agentsd_eval.quality.gain import cost_at
from agentsd_eval.quality.summary import summary_of
from agentsd_eval.studies import table
from click.testing import CliRunner


def spec(split: str | None, right: bool | None, **figures: float | None) -> dict:
    return {"split": split, "right": right} | figures


def test_means_and_paired_changes() -> None:
    seen, pair = "seen", "heldout pair"
    baseline = [spec(seen, True, clip=30), spec(seen, True, clip=20), spec(pair, False, clip=10)]
    ours = [
        spec(seen, True, clip=31, psnr=40),
        spec(seen, False, clip=20, psnr=50),
        spec(pair, True, clip=9, psnr=60),
    ]
    row = summary_of(ours, baseline)
    assert (row["right_seen"], row["right_seen_count"], row["right_seen_change"]) == (0.5, 2, -0.5)
    assert row["right_seen_change_error"] == pytest.approx(0.5)  # changes 0 and -1
    assert (row["right_heldout_pair"], row["right_heldout_pair_change"]) == (1.0, 1.0)
    assert "right_heldout_pair_change_error" not in row  # one image has no spread
    assert (row["clip"], row["clip_change"]) == (20.0, 0.0)
    assert row["clip_change_error"] == pytest.approx(3**-0.5)  # changes 1, 0, -1
    assert row["psnr"] == 50.0
    assert "right_seen_change" not in summary_of(baseline, None)
    assert summary_of([spec(None, None)], None) == {}


def test_perceptual_distances_are_geometric_means_with_the_interval_of_their_logarithms() -> None:
    row = summary_of([spec(None, None, baseline_distance=x) for x in (0.01, 0.1, 1.0)], None)
    half = 1.959964 * np.log(10) / 3**0.5
    assert row["baseline_distance"] == pytest.approx(0.1)
    assert row["baseline_distance_low"] == pytest.approx(0.1 * np.exp(-half))
    assert row["baseline_distance_high"] == pytest.approx(0.1 * np.exp(half))


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
        (-1.0, 0.3, "-1.00 ± 0.59"),
        (0.5, 0.3, "+0.50 ± 0.59 ≈"),
        (0.5, None, "-"),
        (None, None, "-"),
    ],
)
def test_a_change_inside_the_noise_is_marked(value: float | None, error: float | None, text: str) -> None:
    assert change("fd", ".2f")({"fd_change": value, "fd_change_error": error}) == text


@pytest.mark.parametrize(("images", "text"), [(29, "too few to judge"), (30, "-1.00 ± 0.59")])
def test_below_30_images_nothing_is_judged(images: int, text: str) -> None:
    row = {"right_change": -1.0, "right_change_error": 0.3, "images_for_2_percent": 700}
    assert change("right", ".2f")(row | {"images": images}) == text
    assert change("right", ".2f")(row | {"images": 512, "right_count": images}) == text  # of so many
    advice = plan([row | {"images": images}])
    assert advice is not None
    assert ("too few to judge by" in advice) == (images < 30)
    assert ("2%" in advice) == (images >= 30)


def test_plan_is_that_of_the_noisiest_row() -> None:
    rows = [
        {"images_for_2_percent": None},
        {"images_for_2_percent": 700},
        {"images_for_2_percent": 300},
    ]
    assert plan(rows) == "A 2% difference in FD shows at 95% from about 700 images a row on."
    assert plan(rows[:1]) is None


def test_the_embedded_model_is_judged_by_its_prompts(tmp_path: Path) -> None:
    arguments = [
        "table",
        "--methods",
        "agentsd",
        "--ratios",
        0.4,
        "--steps",
        6,
        "--height",
        64,
        "--width",
        64,
        "--images",
        4,
        "--fewer-steps",
        0.5,
        "--reference-steps",
        12,
        "--other-seeds",
        "--references",
        24,
        "--out",
        tmp_path,
    ]
    result = CliRunner().invoke(main, list(map(str, arguments)), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    baseline, fewer, agent, floor = map(json.loads, (tmp_path / "table.jsonl").read_text().splitlines())
    assert 0 <= baseline["right_seen"] <= 1
    shown = sum(agent.get(f"right_{split}_count", 0) for split in ("seen", "heldout_triple", "heldout_pair"))
    assert shown == 4
    assert agent["right_colour_count"] == 4
    assert 0 < baseline["reference_distance"] < fewer["reference_distance"]
    assert 0 < agent["baseline_distance"] < fewer["baseline_distance"]
    assert "baseline_distance" not in baseline
    assert agent["gain_seconds"] > 0 < agent["gain_macs"]
    assert {"kid_seeds", "kid_seeds_change", "diversity"} <= set(agent)
    assert floor["kid"] < baseline["kid"]
    assert floor["images"] == 4
    others = list((tmp_path / "images" / baseline["key"]).glob("1*.png"))
    assert len(others) == 4


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
