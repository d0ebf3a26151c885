"""The committed results are read by today's program, and their figures agree with each other."""

import csv
import re
import shutil
from pathlib import Path

import pytest
from agentsd_eval import run_file
from agentsd_eval.pages.report import write_report
from commands import rows_of

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "eval" / "results"
FOLDERS = sorted(path.parent for path in RESULTS.glob("*/run.json"))
LOGS = {"gpu-h200"}
"""Rows and logs of another machine, by the shell commands that README.md names; without a run.json."""


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_each_result_has_one_set_of_figures_and_can_be_made_again(folder):
    """By a command, from a commit without changes; and its images, where it has some."""
    content = run_file.read(folder)
    results = content["results"]
    assert sorted(results) == sorted(path.stem for path in folder.glob("*.jsonl"))
    assert all(maker["clean"] for maker in (*results.values(), *content.get("environments", {}).values()))
    for name, run in results.items():
        assert run["command"].startswith(("agentsd-eval ", "accelerate ", "python -m "))
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


def test_pages_cite_every_folder_and_no_other():
    pages = [ROOT / "README.md", ROOT / "demo/agentsd_demo/MODEL_CARD.md", *(ROOT / "docs").rglob("*.md")]
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    assert set(re.findall(r"eval/results/([\w-]+)/", text)) == {folder.name for folder in FOLDERS} | LOGS


def test_a_report_is_written_of_priced_runs(tmp_path):
    folder = shutil.copytree(RESULTS / "priced-sd15-cpu", tmp_path / "run")
    page = write_report(folder, 4).read_text(encoding="utf-8")
    assert all(row["method"] in page for row in rows_of(folder / "latency.jsonl"))
