"""Images that equal the baseline's: neither an infinite figure nor a tiny one stands for them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from agentsd_eval.cli import main
from agentsd_eval.pages.quality_table import interval
from agentsd_eval.quality.summary import summary_of
from click.testing import CliRunner
from logs import warned


def image(psnr: float, distance: float) -> dict[str, Any]:
    return {"psnr": psnr, "baseline_distance": distance}


def test_an_equal_image_is_counted_and_in_no_mean() -> None:
    row = summary_of([image(20.0, 0.01), image(math.inf, 0.0), image(30.0, 0.04)], None)
    assert (row["psnr"], row["equal_images"]) == (25.0, 1)
    assert row["baseline_distance"] == pytest.approx(0.02)


def test_where_all_are_equal_the_distance_is_zero_and_says_so() -> None:
    row = summary_of([image(math.inf, 0.0)] * 3, None)
    assert "psnr" not in row
    assert (row["baseline_distance"], row["equal_images"]) == (0, 3)
    assert interval("baseline_distance")(row) == "equal"


def test_a_method_that_changes_nothing_has_a_table_and_a_report(model_folder: str, tmp_path: Path) -> None:
    """Four steps have none to spare, so step caching leaves nothing out."""
    (tmp_path / "prompts.txt").write_text("a cat\n")
    table = ["table", "--model", model_folder, "--prompts", tmp_path / "prompts.txt", "--methods"]
    table += [
        "fast",
        "--steps",
        4,
        "--fewer-steps",
        "none",
        "--reference-steps",
        "none",
        "--images",
        2,
        "--scheduler",
        "ddim",
    ]
    with warned("nothing is skipped"):
        done = CliRunner().invoke(main, list(map(str, [*table, "--out", tmp_path / "run"])))
    assert done.exit_code == 0, done.output
    row = json.loads((tmp_path / "run" / "table.jsonl").read_text().splitlines()[1])
    assert row["equal_images"] == 2
    assert row["baseline_distance"] == 0
    assert "| fast | 2 | equal | equal | 2 |" in (tmp_path / "run" / "table.md").read_text()
    done = CliRunner().invoke(main, ["report", str(tmp_path / "run")])
    assert done.exit_code == 0, done.output
    page = (tmp_path / "run" / "report.html").read_text()
    assert "The images of fast are the baseline&#39;s. No row&#39;s gain is known" in page
