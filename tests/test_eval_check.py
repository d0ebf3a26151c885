"""`agentsd-eval check` on a tiny random model: its rows, its page, and the file that can be sent in."""

import json
import re
from functools import partial
from pathlib import Path

import commands
import pytest
from agentsd_eval.pages.quality_table import disturbed, verdict
from agentsd_eval.presets import load_settings
from agentsd_eval.settings import CheckSettings, RunSettings
from agentsd_eval.studies import table

from agentsd import Recipe, StepCache

RUN = ("--images", 2, "--steps", 5, "--reference-steps", 8, "--methods", "fast")


invoke = partial(commands.invoke, "check")


def test_one_command_leaves_a_page_and_results_to_send(model_folder, tmp_path):
    mine = Recipe(steps=StepCache(extrapolation_order=0, interval=3)).save(tmp_path / "mine.json")
    out = tmp_path / "private" / "run"
    told = commands.run("check", "--model", model_folder, "--calibrated", mine, *RUN, "--out", out)
    note, forecast, *progress = told.stderr.splitlines()[1:]
    assert note.endswith("take 30 prompts or more")
    assert re.fullmatch(r"22 images, about 0 min at most, on .+ \(threads: \d+\); they go to .*", forecast)
    assert all(re.fullmatch(r"[\w ]+: \d+ of \d+(, \d+ min left)?", line) for line in progress)
    said, *shown = told.stdout.splitlines()
    assert said == "2 images a row don't say what gains: take 30 prompts or more."
    heads = [head.strip() for head in shown[1].strip("┃ ").split("┃")]
    assert heads == ["method", "distance", "speed-up", "gain by time"]
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
    assert sent["rows"] == commands.rows_of(out / "check.jsonl")
    assert all(row["reference_distance"] >= 0 and row["macs"] > 0 for row in sent["rows"])
    assert (sent["format"], sent["settings"]["steps"]) == (2, 5)
    assert sent["settings"]["model"] == Path(model_folder).name
    assert sent["environment"]["versions"]["agentsd"]
    for private in (str(tmp_path), str(Path(model_folder).parent), "fox"):
        assert private not in text


def gained(name, low, key="gain_seconds", **more):
    """A row whose gain is within 0.1 of low + 0.1."""
    ends = {f"{key}_low": low, f"{key}_high": low + 0.2, f"{key}_beyond": None}
    return {"method": name, "label": name, "images": 32, key: low + 0.1} | ends | more


def test_what_gains_over_fewer_steps_is_said():
    fast, agentsd = gained("fast", 1.05), gained("agentsd", 0.95)
    told = "fast takes 13% less time than fewer steps for images as near to the reference"
    assert verdict([fast, agentsd]) == f"{told}: gain 1.15 (1.05-1.25)."
    assert verdict([fast | {"images": 29}]).startswith("29 images a row don't say what gains")
    assert verdict([fast | {"captions": 29}]).endswith("take 30 prompts or more.")
    assert verdict([agentsd]).endswith("take fewer steps.")
    assert verdict([{"method": "baseline", "images": 32}]).startswith("No row's gain is known")


def test_over_the_best_plain_sampler_a_plain_row_is_no_gain():
    best = partial(gained, key="gain_best_seconds")
    rows = [best("fast", 0.97, gain_seconds=1.15), best("agentsd", 0.7), best("baseline@17/unipckarras", 1.2)]
    assert verdict(rows).endswith("take fewer steps.")


def test_times_that_do_not_follow_the_steps_are_told_and_nothing_is_said_by_time():
    """As they were: 12 steps at 0.66x and 10 at 6.28x. Samplers are apart."""

    def plain(sampler, speedups):
        names = {step: f"baseline{step}/{sampler}" if sampler else f"baseline{step}" for step in speedups}
        return [
            {"method": name, "label": name, "sampler": sampler, "speedup": speedups[step]}
            for step, name in names.items()
        ]

    rows = plain(None, {"": 1.0, "@12": 0.66, "@10": 6.28})
    assert disturbed(rows).startswith("Times don't follow the steps (baseline 1.00x and baseline@12 0.66x): ")
    assert verdict([*rows, gained("fast", 1.2)]) == disturbed(rows)
    assert not disturbed([*plain(None, {"": 1.0, "@12": 2.0}), *plain("unipckarras", {"": 0.9, "@12": 1.9})])


def test_the_rows_are_those_of_the_readmes_table():
    benchmark, check = load_settings(RunSettings, "benchmark", {}), CheckSettings()
    assert [m.key for m in table.table_methods(check)] == [m.key for m in table.table_methods(benchmark)]
    alike = {"reference_steps", "guidance_scale"}
    assert check.model_dump(include=alike) == benchmark.model_dump(include=alike)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "mine.json: no such file; agentsd-eval calibrate writes one"),
        ("[", "mine.json is no recipe"),
    ],
)
def test_a_wrong_file_is_one_message_before_any_image(content, message, model_folder, tmp_path):
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
def test_a_file_is_not_called_as_another_row_is(tmp_path, names, message):
    words = []
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        words += ["--calibrated", Recipe(steps=StepCache()).save(tmp_path / f"{name}.json")]
    assert message in invoke(*words, code=2)
