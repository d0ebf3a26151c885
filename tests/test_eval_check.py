"""`agentsd-eval check` on a tiny random model: its rows, its page, and the file that can be sent in."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from agentsd_eval.cli import main
from agentsd_eval.images.prompts import SHIPPED, specs_of
from agentsd_eval.pages.quality_table import disturbed, verdict
from agentsd_eval.presets import load_settings
from agentsd_eval.settings import CheckSettings, RunSettings
from agentsd_eval.studies import table
from click.testing import CliRunner, Result

from agentsd import Recipe, StepCache

RUN = ("--images", 2, "--steps", 5, "--reference-steps", 8, "--methods", "fast")


def run(*arguments: object, code: int = 0) -> Result:
    result = CliRunner().invoke(main, ["check", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result


def invoke(*arguments: object, code: int = 0) -> str:
    return " ".join(run(*arguments, code=code).output.split())


def test_one_command_leaves_a_page_and_results_to_send(
    model_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = Recipe(steps=StepCache(extrapolation_order=0, interval=3)).save(tmp_path / "mine.json")
    out = tmp_path / "private" / "run"
    arguments = ("--model", model_folder, "--calibrated", mine, *RUN, "--out", out)
    told = run(*arguments)
    note, forecast, *progress = told.stderr.splitlines()[1:]
    assert note.endswith("take 30 prompts or more")
    assert re.fullmatch(r"22 images, about 0 min at most, on .+ \(threads: \d+\); they go to .*", forecast)
    assert all(re.fullmatch(r"[\w ]+: \d+ of \d+(, \d+ min left)?", line) for line in progress)
    said, *shown = told.stdout.splitlines()
    assert said == "2 images a row don't say what gains: take 30 prompts or more."
    assert shown[1].split() == [
        "┃",
        "method",
        "┃",
        "distance",
        "┃",
        "speed-up",
        "┃",
        "gain",
        "by",
        "time",
        "┃",
    ]
    assert max(map(len, shown[:14])) <= 80
    page = (out / "report.html").read_text()
    assert '<p class="headline">2 images a row don&#39;t say what gains' in page
    assert "The recipes on this model" in page
    assert "a photograph of a fox in the snow" in page
    text = (out / "check.json").read_text()
    sent = json.loads(text)
    plain = ["baseline", "baseline@4", "baseline@3", "baseline@2"]
    others = [f"{name}/unipckarras" for name in plain]
    assert [row["label"] for row in sent["rows"]] == [*plain, *others, "fast", "mine"]
    assert all(row["gain_best_macs"] > 0 for row in sent["rows"])
    assert sent["rows"] == [json.loads(line) for line in (out / "check.jsonl").read_text().splitlines()]
    assert all(row["reference_distance"] >= 0 and row["macs"] > 0 for row in sent["rows"])
    assert (sent["format"], sent["settings"]["steps"]) == (2, 5)
    assert sent["settings"]["model"] == Path(model_folder).name
    assert sent["environment"]["versions"]["agentsd"]
    for private in (str(tmp_path), str(Path(model_folder).parent), "fox"):
        assert private not in text
    monkeypatch.setattr(
        "agentsd_eval.images.generate.sample", lambda *args, **kwargs: pytest.fail("made again")
    )
    invoke(*arguments)
    assert [row["key"] for row in json.loads((out / "check.json").read_text())["rows"]] == [
        row["key"] for row in sent["rows"]
    ]


def test_own_prompts_are_kept_and_other_models_have_those_that_ship(tmp_path: Path) -> None:
    own = tmp_path / "prompts.txt"
    own.write_text("a cat\n")
    assert {spec.prompt for spec in specs_of(CheckSettings(model="x/y", prompts=own))} == {"a cat"}
    shipped = [spec.prompt for spec in specs_of(CheckSettings(model="x/y"))]
    assert shipped == SHIPPED.read_text().splitlines()
    assert len(set(shipped)) == CheckSettings().images


KEY = "gain_seconds"


def test_what_gains_over_fewer_steps_is_said() -> None:
    rows = [
        {"method": name, "label": name, "images": 32, "gain_seconds": low + 0.1, "gain_seconds_low": low}
        for name, low in (("fast", 1.05), ("agentsd", 0.95))
    ]
    for row in rows:
        row[f"{KEY}_high"], row[f"{KEY}_beyond"] = row[KEY] + 0.1, None
    assert verdict(rows) == (
        "fast takes 13% less time than fewer steps for images as near to the reference: "
        "gain 1.15 (1.05-1.25)."
    )
    assert verdict([rows[0] | {"images": 29}]).startswith("29 images a row don't say what gains")
    assert verdict([rows[0] | {"captions": 29}]).endswith("take 30 prompts or more.")
    assert verdict(rows[1:]).endswith("take fewer steps.")
    assert verdict([{"method": "baseline", "images": 32}]).startswith("No row's gain is known")
    best = [{"gain_best_seconds": low, "gain_best_seconds_low": low} for low in (0.97, 0.7, 1.2)]
    plain = {"method": "baseline@17/unipckarras", "label": "UniPC", "images": 32}
    assert verdict([a | b for a, b in zip([*rows, plain], best, strict=True)]).endswith("take fewer steps.")


def test_times_that_do_not_follow_the_steps_are_told_and_nothing_is_said_by_time() -> None:
    """As they were: 12 steps at 0.66x and 10 at 6.28x. Samplers are apart."""

    def plain(sampler: str | None, **speedups: float) -> list[dict[str, object]]:
        end = f"/{sampler}" if sampler else ""
        rows = {f"baseline{step.replace('_', '@')}{end}": speed for step, speed in speedups.items()}
        return [{"method": m, "label": m, "sampler": sampler, "speedup": speed} for m, speed in rows.items()]

    rows = plain(None, **{"": 1.0, "_12": 0.66, "_10": 6.28})
    assert disturbed(rows).startswith("Times don't follow the steps (baseline 1.00x and baseline@12 0.66x): ")
    fast = {"method": "fast", "label": "fast", "images": 32, KEY: 1.3, f"{KEY}_low": 1.2, f"{KEY}_high": 1.4}
    assert verdict([*rows, fast]) == disturbed(rows)
    assert not disturbed(
        [*plain(None, **{"": 1.0, "_12": 2.0}), *plain("unipckarras", **{"": 0.9, "_12": 1.9})]
    )


def test_the_rows_are_those_of_the_readmes_table() -> None:
    benchmark, check = load_settings(RunSettings, "benchmark_64", {}), CheckSettings()
    assert [m.key for m in table.table_methods(check)] == [m.key for m in table.table_methods(benchmark)]
    assert (check.reference_steps, check.guidance_scale) == (
        benchmark.reference_steps,
        benchmark.guidance_scale,
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "mine.json isn't there; make it first"), ("[", "mine.json is no recipe")],
)
def test_a_wrong_file_is_one_message_before_any_image(
    content: str | None, message: str, model_folder: str, tmp_path: Path
) -> None:
    path = tmp_path / "mine.json"
    if content is not None:
        path.write_text(content)
    printed = invoke("--model", model_folder, "--calibrated", path, *RUN, "--out", tmp_path / "run", code=2)
    assert message in printed
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["fast"], "'fast' is a method already: choose another name"),
        (["a+b"], "the name 'a+b' is empty or holds"),
        (["a/mine", "b/mine"], "files are called alike: rename one"),
    ],
)
def test_a_file_is_not_called_as_another_row_is(tmp_path: Path, names: list[str], message: str) -> None:
    words = []
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        words += ["--calibrated", Recipe(steps=StepCache()).save(tmp_path / f"{name}.json")]
    assert message in invoke(*words, code=2)
