"""Figures of a row from figures of its pictures, and the embedded model's prompt accuracy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from agentsd_eval.cli import app
from agentsd_eval.pages.quality_table import change, plan
from agentsd_eval.quality.judge import _mean_of
from typer.testing import CliRunner


def picture(
    split: str | None, right: bool | None, clip: float | None = None, psnr: float | None = None
) -> dict:
    return {
        "split": split, "right": right, "clip": clip, "psnr": psnr, "ssim": None, "feature_distance": None
    }  # fmt: skip


def test_means_and_paired_changes() -> None:
    stock = [picture("seen", True, 30.0), picture("seen", True, 20.0), picture("heldout", False, 10.0)]
    ours = [
        picture("seen", True, 31.0, 40.0),
        picture("seen", False, 20.0, 50.0),
        picture("heldout", True, 9.0, 60.0),
    ]
    row = _mean_of(ours, stock)
    assert (row["right_seen"], row["right_seen_count"], row["right_seen_change"]) == (0.5, 2, -0.5)
    assert row["right_seen_change_error"] == pytest.approx(0.5)  # changes 0 and -1
    assert (row["right_heldout"], row["right_heldout_change"]) == (1.0, 1.0)
    assert "right_heldout_change_error" not in row  # one picture has no spread
    assert (row["clip"], row["clip_change"]) == (20.0, 0.0)
    assert row["clip_change_error"] == pytest.approx(3**-0.5)  # changes 1, 0, -1
    assert (row["psnr"], row["psnr_error"]) == (50.0, pytest.approx(10 / 3**0.5))
    assert "ssim" not in row
    assert "right_seen_change" not in _mean_of(stock, stock)
    assert _mean_of([picture(None, None)], [picture(None, None)]) == {}


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
    assert change("frechet", ".2f")({"frechet_change": value, "frechet_change_error": error}) == text


@pytest.mark.parametrize(("images", "text"), [(29, "too few to judge"), (30, "-1.00 ± 0.59")])
def test_below_30_pictures_nothing_is_judged(images: int, text: str) -> None:
    row = {"right_change": -1.0, "right_change_error": 0.3, "pictures_for_2_percent": 700}
    assert change("right", ".2f")(row | {"images": images}) == text
    assert change("right", ".2f")(row | {"images": 512, "right_count": images}) == text  # of so many
    advice = plan([row | {"images": images}])
    assert advice is not None
    assert ("too few to judge by" in advice) == (images < 30)
    assert ("2%" in advice) == (images >= 30)


def test_plan_is_that_of_the_noisiest_row() -> None:
    rows = [
        {"pictures_for_2_percent": None},
        {"pictures_for_2_percent": 700},
        {"pictures_for_2_percent": 300},
    ]
    assert plan(rows) == "A 2% difference in Fréchet distance shows at 95% from about 700 pictures a row on."
    assert plan(rows[:1]) is None


def test_the_embedded_model_is_judged_by_its_prompts(tmp_path: Path) -> None:
    arguments = [
        "table",
        "--method",
        "exact",
        "--ratio",
        0.4,
        "--steps",
        2,
        "--images",
        4,
        "--fewer-steps",
        "none",
        "--out",
        tmp_path,
    ]
    result = CliRunner().invoke(app, list(map(str, arguments)), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    stock, agent, floor = map(json.loads, (tmp_path / "table.jsonl").read_text().splitlines())
    assert 0 <= stock["right_seen"] <= 1
    assert agent["right_seen_count"] + agent.get("right_heldout_count", 0) == 4
    assert 0 < floor["frechet"] < stock["frechet"]
    assert floor["images"] == 4
