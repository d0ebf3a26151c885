"""Figures of a row from figures of its images, and a table of the toy model."""

import json
import math
import shlex

import pytest
from agentsd_eval.pages.quality_table import change, tables_of
from agentsd_eval.quality.summary import summary_of
from agentsd_eval.studies import table
from commands import ALONE, invoke, rows_of
from logs import warned


def test_means_and_paired_changes():
    baseline = [{"clip": 30}, {"clip": 20}, {"clip": 10}]
    ours = [{"clip": 31, "psnr": 40}, {"clip": 20, "psnr": 50}, {"clip": 9, "psnr": 60}]
    row = summary_of(ours, baseline)
    assert (row["clip"], row["clip_change"], row["psnr"]) == (20.0, 0.0, 50.0)
    assert row["clip_change_error"] == pytest.approx(3**-0.5)  # changes 1, 0, -1
    assert "clip_change" not in summary_of(baseline, None)
    assert summary_of([{}], None) == {}


def test_an_equal_image_is_counted_and_in_no_mean():
    images = ((20.0, 0.01), (math.inf, 0.0), (30.0, 0.04))
    row = summary_of([{"psnr": psnr, "baseline_distance": far} for psnr, far in images], None)
    assert (row["psnr"], row["equal_images"]) == (25.0, 1)
    assert row["baseline_distance"] == pytest.approx(0.02)  # the geometric mean


def test_a_method_that_changes_nothing_has_a_table_and_a_report(model_folder, tmp_path):
    """Four steps have none to spare, so step caching leaves nothing out."""
    words = ("--methods", "fast", "--steps", 4, *ALONE, "--images", 2, "--scheduler", "ddim")
    with warned("nothing is skipped"):
        invoke("table", "--model", model_folder, *words, "--out", tmp_path)
    row = rows_of(tmp_path / "table.jsonl")[1]
    assert (row["equal_images"], row["baseline_distance"], row.get("psnr")) == (2, 0, None)
    assert "| fast | 2 | equal | equal | 2 |" in (tmp_path / "table.md").read_text()
    invoke("report", tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert "The images of fast are the baseline&#39;s. No row&#39;s gain is known" in page


PLAIN = (("baseline", 100, 1.0, 0.1), ("baseline@12", 50, 2.0, 0.2))
UNDER_B = (("baseline@20/b", 80, 1.25, 0.1), ("baseline@10/b", 40, 2.5, 0.2))


def with_gain(*given):
    """Rows of a name, MACs, a speed-up and a distance, which have three images each, by their names."""
    keys = "method", "macs", "speedup"
    rows = [dict(zip(keys, one, strict=False)) | {"key": one[0]} for one in given]
    for row in rows:
        row["sampler"] = row["method"].partition("/")[2] or None
    far = [(name, distance * factor) for name, *_, distance in given for factor in (1, 2, 3)]
    table.add_gain(rows, [{"method": name, "reference_distance": distance} for name, distance in far])
    return {row["method"]: row for row in rows}


def test_gain_is_what_fewer_steps_cost_at_the_distance_over_the_own_cost():
    found = with_gain(*PLAIN, ("quick", 50, 1.6, 0.1))
    quick = found["quick"]
    assert (quick["gain_macs"], quick["gain_seconds"]) == pytest.approx((2.0, 1.6))
    assert quick["gain_seconds_beyond"] is None
    assert "gain_seconds" not in found["baseline"]
    assert not any("gain_best_macs" in row for row in found.values())


def test_gain_over_the_best_plain_sampler_is_against_the_lower_envelope():
    """By hand: at a distance of .2 the own sampler costs 50 and the other one 40; at .1, 100 and 80."""
    found = with_gain(*PLAIN, *UNDER_B, ("quick", 20, 5.0, 0.2), ("quick/b", 20, 5.0, 0.1))
    quick, other = found["quick"], found["quick/b"]
    assert (quick["gain_macs"], quick["gain_best_macs"]) == pytest.approx((50 / 20, 40 / 20))
    assert (other["gain_macs"], other["gain_best_macs"]) == pytest.approx((80 / 20, 80 / 20))
    assert quick["gain_best_seconds"] == pytest.approx(2.0)
    for name, *_ in PLAIN:
        assert found[name]["gain_best_macs"] == pytest.approx(0.8)  # swap the sampler
    assert all("gain_macs" not in found[name] for name, *_ in (*PLAIN, *UNDER_B))


def test_one_plain_row_has_no_gain_and_gives_none():
    found = with_gain(PLAIN[0], ("fast", 100, 1.0, 0.1))
    assert not any(key.startswith("gain") for row in found.values() for key in row)


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [(-1.0, 0.3, "-1.00 ± 0.61"), (0.5, 0.3, "+0.50 ± 0.61 ≈"), (0.5, None, "-"), (None, None, "-")],
)
def test_a_change_inside_the_noise_is_marked(value, error, text):
    assert change("fd", ".2f")({"fd_change": value, "fd_change_error": error}) == text


def test_a_table_of_the_toy_model(tmp_path):
    options = {
        "methods": "agentsd", "steps": 6, "images": 3, "fewer-steps": 0.5, "samplers": "none",
        "reference-steps": 12, "references": 16, "out": tmp_path,
    }  # fmt: skip
    words = [str(word) for key, value in options.items() for word in (f"--{key}", value)]
    invoke("table", *words)
    baseline, fewer, agent, floor = rows_of(tmp_path / "table.jsonl")
    assert 0 < baseline["reference_distance"] < fewer["reference_distance"]
    assert 0 < agent["baseline_distance"] < fewer["baseline_distance"]
    assert "baseline_distance" not in baseline
    assert agent["gain_seconds"] > 0 < agent["gain_macs"]
    assert floor["kid"] < baseline["kid"]
    assert floor["images"] == 3
    run = json.loads((tmp_path / "run.json").read_text())
    assert run["results"]["table"]["command"] == shlex.join(["agentsd-eval", "table", *words])
    assert {row["macs"] for row in run["costs"].values()} == {row["macs"] for row in (baseline, fewer, agent)}


@pytest.mark.parametrize("clock", ["CPU", "wall"])
def test_a_table_names_the_clock_that_it_went_by(clock):
    """On devices without memory figures, too: MPS, XPU."""
    row = {"method": "fast", "ratio": None, "label": "fast", "speedup": 1.5, "memory_per_image": None}
    heads = [column.title for column in tables_of([row], {"features": None, "model": "x/y"}, clock)["cost"]]
    assert [head for head in heads if head.startswith("speed-up")] == [f"speed-up ({clock} time)"]
