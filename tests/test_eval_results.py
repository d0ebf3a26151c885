"""The committed results are read by today's program, and their figures agree with each other."""

from __future__ import annotations

import csv
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from agentsd_eval import run_file
from agentsd_eval.pages.report import write_report

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "eval" / "results"
FOLDERS = sorted(path.parent for path in RESULTS.glob("*/run.json"))
LOGS = {"gpu-h200"}
"""Rows and logs of another machine, by the shell commands that README.md names; without a run.json."""


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_each_result_names_its_maker_and_has_one_set_of_figures(folder: Path) -> None:
    results = run_file.read(folder)["results"]
    assert sorted(results) == sorted(path.stem for path in folder.glob("*.jsonl"))
    for name, run in results.items():
        assert run["threads"] >= 1 <= run["processes"]
        assert {"torch", "diffusers"} <= set(run["versions"])
        rows = rows_of(folder / f"{name}.jsonl")
        with (folder / f"{name}.csv").open(encoding="utf-8", newline="") as file:
            copies = list(csv.DictReader(file))
        for row, copy in zip(rows, copies, strict=True):
            for key, value in row.items():
                if isinstance(value, float):
                    assert float(copy[key]) == value
        assert run["command"] in (folder / f"{name}.md").read_text(encoding="utf-8")


def test_pages_cite_every_folder_and_no_other() -> None:
    pages = [ROOT / "README.md", ROOT / "demo/agentsd_demo/MODEL_CARD.md", *(ROOT / "docs").rglob("*.md")]
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    assert set(re.findall(r"eval/results/([\w-]+)/", text)) == {folder.name for folder in FOLDERS} | LOGS


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_each_result_can_be_made_again(folder: Path) -> None:
    """By a command, from a commit without changes; and its images, where it has some."""
    run = run_file.read(folder)
    made = [*run["results"].values(), *run.get("environments", {}).values()]
    assert all(one["clean"] for one in made)
    assert all(
        one["command"].startswith(("agentsd-eval ", "accelerate ", "python -m "))
        for one in run["results"].values()
    )


@pytest.mark.parametrize("name", ["benchmark-64-demo", "priced-sd15-cpu"])
def test_a_report_is_written_of_them(name: str, tmp_path: Path) -> None:
    folder = tmp_path / name
    shutil.copytree(RESULTS / name, folder, ignore=shutil.ignore_patterns("features"))
    page = write_report(folder, 4).read_text(encoding="utf-8")
    for result in run_file.read(folder)["results"]:
        for row in rows_of(folder / f"{result}.jsonl"):
            assert row["method"] in page
