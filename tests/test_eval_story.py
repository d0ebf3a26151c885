"""Several tables in one picture: which rows stand in it, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from agentsd_eval.cli import app
from agentsd_eval.errors import EvalError
from agentsd_eval.pages.story import draw_story, family_of
from agentsd_eval.studies.frontier import joined
from typer.testing import CliRunner


def run_of(folder: Path, rows: dict[str, tuple[float, float]], **pictures: Any) -> Path:
    """A run whose table has these rows: MACs and distance by label."""
    folder.mkdir()
    alike = {"model": "demo", "weights": "a", "dtype": "float32", "height": 64, "width": 64}
    alike |= {"guidance_scale": 4.0, "steps": 25, "scheduler": "plms"} | pictures
    (folder / "run.json").write_text(json.dumps({"format": 2, "pictures": alike}))
    lines = [
        {
            "method": label,
            "label": label,
            "images": 32,
            "macs": cost,
            "speedup": 100 / cost,
            "reference_distance": distance,
            "reference_distance_low": 0.9 * distance,
            "reference_distance_high": 1.1 * distance,
        }
        for label, (cost, distance) in rows.items()
    ]
    lines.append({"method": "real/real", "label": "real/real", "kid": 0.1})
    (folder / "table.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder


PLAIN = {"baseline": (100.0, 0.01), "baseline@12": (48.0, 0.04)}


def test_cost_is_that_of_the_same_tables_baseline(tmp_path: Path) -> None:
    one = run_of(tmp_path / "one", PLAIN | {"step-caching": (57.0, 0.017)})
    other = run_of(tmp_path / "other", {"baseline": (200.0, 0.02), "paper": (150.0, 0.2)}, scheduler="ddim")
    rows = {(row["sampler"], row["label"]): row for row in joined([one, other], ())}
    assert rows["plms", "step-caching"]["cost_macs"] == pytest.approx(0.57)
    assert rows["ddim", "paper"]["cost_macs"] == pytest.approx(0.75)
    assert rows["plms", "step-caching"]["cost_seconds"] == pytest.approx(0.57)
    assert rows["plms", "baseline@12"]["steps"] == 12
    assert len(rows) == 5  # real pictures have no place in it


def test_of_two_rows_of_a_method_the_first_runs_stands(tmp_path: Path) -> None:
    one = run_of(tmp_path / "one", PLAIN | {"step-caching": (57.0, 0.017)})
    other = run_of(tmp_path / "other", PLAIN | {"step-caching": (57.0, 0.5), "paper": (80.0, 0.2)})
    rows = {row["label"]: row for row in joined([one, other], ())}
    assert rows["step-caching"]["reference_distance"] == 0.017
    assert rows["step-caching"]["run"] == "one"
    assert rows["paper"]["run"] == "other"


def test_named_methods_stand_beside_all_of_baselines_rows(tmp_path: Path) -> None:
    one = run_of(tmp_path / "one", PLAIN | {"step-caching": (57.0, 0.017), "paper": (80.0, 0.2)})
    assert [row["label"] for row in joined([one], ("paper",))] == ["baseline", "paper", "baseline@12"]


def test_what_is_refused(tmp_path: Path) -> None:
    one = run_of(tmp_path / "one", PLAIN)
    larger = run_of(tmp_path / "larger", PLAIN, height=96)
    with pytest.raises(EvalError, match=r"larger has height 96, .*one 64"):
        joined([one, larger], ())
    with pytest.raises(EvalError, match=r"no run has a row 'tgate'; they have baseline, baseline@12"):
        joined([one], ("tgate",))
    with pytest.raises(EvalError, match="holds no table; run agentsd-eval table --out"):
        joined([tmp_path], ())
    (one / "table.jsonl").write_text(json.dumps({"method": "baseline", "label": "baseline", "images": 4}))
    with pytest.raises(EvalError, match="--reference-steps"):
        joined([one], ())


def test_rows_of_one_method_are_joined() -> None:
    labels = [
        "baseline",
        "baseline@12",
        "deepcache-2",
        "deepcache-3",
        "calibrated-1.75",
        "paper r=0.4",
        "step-caching@12",
    ]
    assert [family_of(label) for label in labels] == [
        *("baseline", "baseline", "deepcache", "deepcache", "calibrated", "paper", "step-caching")
    ]


def test_a_row_without_a_time_is_drawn_by_its_cost(tmp_path: Path) -> None:
    one = run_of(tmp_path / "one", PLAIN | {"step-caching": (57.0, 0.017)})
    rows = joined([one], ())
    rows[1]["cost_seconds"] = None
    assert draw_story(rows, "a title").startswith(b"\x89PNG")


def test_what_a_row_is_called_decides_nothing(tmp_path: Path) -> None:
    """A method in fewer steps with a ratio, and one of a user's own that is called like the baseline."""
    labels = {"agentsd@12": "agentsd@12 r=0.4", "baseline-2": "baseline-2"}
    one = run_of(tmp_path / "one", PLAIN | dict.fromkeys(labels, (57.0, 0.017)))
    lines = map(json.loads, (one / "table.jsonl").read_text().splitlines())
    rows = [row | {"label": labels.get(row["label"], row["label"])} for row in lines]
    (one / "table.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = {row["label"]: row for row in joined([one], ())}
    assert (found["agentsd@12 r=0.4"]["steps"], found["baseline@12"]["steps"]) == (12, 12)
    assert [label for label, row in found.items() if row["plain"]] == ["baseline", "baseline@12"]
    assert draw_story(list(found.values()), "").startswith(b"\x89PNG")


def test_the_command_writes_a_picture_and_its_table(tmp_path: Path) -> None:
    one = run_of(tmp_path / "one", PLAIN | {"step-caching": (57.0, 0.017)})
    done = CliRunner().invoke(app, ["frontier", "--run", str(one), "--out", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "out/frontier.png").read_bytes().startswith(b"\x89PNG")
    assert "| step-caching | plms | 32 | 0.57 | 0.57 | 17 (15.3-18.7) | - | - |" in (
        tmp_path / "out/frontier.md"
    ).read_text(encoding="utf-8")
    done = CliRunner().invoke(app, ["report", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert "<td>17 (15.3-18.7)</td>" in (tmp_path / "out/report.html").read_text(encoding="utf-8")
    none = CliRunner().invoke(app, ["frontier", "--out", str(tmp_path / "none")])
    assert none.exit_code == 2
    assert "run = ()" in none.output
