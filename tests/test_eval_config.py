"""Settings: command line over YAML over defaults; what is wrong is named with its way out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from agentsd_eval.cli import COMMANDS
from agentsd_eval.errors import EvalError
from agentsd_eval.images.methods import parse_method
from agentsd_eval.images.prompts import specs_of
from agentsd_eval.presets import load_settings, presets
from agentsd_eval.research.settings import PricedSettings, SubjectSettings
from agentsd_eval.settings import CompareSettings, LatencySettings, RunSettings
from agentsd_eval.studies import table

from agentsd.recipe import MODES


def write(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text)
    return path


def test_command_line_over_yaml_over_defaults(tmp_path: Path) -> None:
    path = write(tmp_path, "steps: 7\nseed: 3\n")
    settings = load_settings(RunSettings, path, {"steps": 9, "seed": None})
    assert (settings.steps, settings.seed, settings.guidance_scale) == (9, 3, 4.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stepz: 7", "unknown key 'stepz'; did you mean 'steps'"),
        ("xyzzy: 7", "unknown key 'xyzzy'; --help lists"),
        ("steps: 0", "steps = 0: pass 1 or more"),
        ("scheduler: heun", "scheduler = 'heun': choose model, plms, ddim"),
        ("named: {mine: gone.yaml}", r"mine: .*gone\.yaml isn't there"),
        ("named: {mine: {kk: 1}}", "mine: kk=1: this recipe has no kk, leave it out"),
        ("named: {a+b: {k: 1}}", r"'a\+b' is empty or holds"),
        ("named: {mine: {scale: 0.54}}", "scale=0.54: it is the exponent"),
        ("guidance_scale: .inf", "guidance_scale = inf: pass a finite number"),
        ("ratios: []", r"ratios = \[\]: pass at least 1"),
        ("methods: [tome]", "unknown method 'tome' in 'tome'; did you mean tomesd"),
        ("model: ./nowhere", r"model = './nowhere': there is no such folder, and it is no hub id"),
        ("reference: ./nowhere", "there is no such folder"),
        ("device: toaster!", "device = 'toaster!': name a device as torch does"),
        ("height: 100", "height = 100: pass a multiple of 8"),
        ("- 1", "holds a list: write `name: value` lines"),
        ("a: [", "not valid YAML"),
    ],
)
def test_wrong_settings_are_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(EvalError, match=message):
        load_settings(RunSettings, write(tmp_path, text), {})


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(EvalError, match=r"can't read the configuration .*gone\.yaml: no such file or preset"):
        load_settings(CompareSettings, tmp_path / "gone.yaml", {})


@pytest.mark.parametrize(("key", "value"), [("sizes", (100,)), ("sizes", (8,)), ("batches", (0,))])
def test_latency_sizes_and_batches_are_whole(key: str, value: tuple[int, ...]) -> None:
    with pytest.raises(EvalError, match=f"--{key} = "):
        load_settings(LatencySettings, None, {key: value})


def test_the_papers_presets_are_the_papers() -> None:
    table10 = load_settings(RunSettings, "table10", {})
    assert (table10.scheduler, table10.steps, table10.guidance_scale) == ("plms", 50, 7.5)
    specs = specs_of(table10)
    assert len(specs) == 2000
    assert specs[3].prompt == "A high quality photograph of a goldfish."
    assert specs[-1].prompt == "A high quality photograph of a toilet tissue."
    methods = table.table_methods(table10)
    ratios = (0.1, 0.2, 0.3, 0.4, 0.5)
    rows = [f"{name} r={ratio}" for name in ("tomesd", "agentsd") for ratio in ratios]
    assert [m.label for m in methods] == ["baseline", *rows]
    varied = {11: ("k", (0, 0.025, 0.075, 0.15)), 12: ("scale", (-0.5, -0.25, -0.15, -0.05))}
    for number, (key, values) in (varied | {13: ("early_frac", (0.2, 0.4, 0.6, 0.8))}).items():
        settings = load_settings(RunSettings, f"table{number}", {})
        assert specs_of(settings) == specs
        expected = [MODES["agentsd"].with_settings(ratio=0.5, **{key: value}) for value in values]
        assert [m.recipe for m in table.table_methods(settings)] == [None, *expected]


LISTED = [(name, command) for name, preset in presets().items() for command in preset["commands"]]
STUDIES = sorted((Path(__file__).parents[1] / "eval/research/presets").glob("*.yaml"))


@pytest.mark.parametrize(("name", "command"), LISTED)
def test_each_preset_is_valid_for_each_of_its_commands(
    name: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentsd_eval.settings.DRIVERS", (Path("/"),))  # as if there were a GPU
    settings: Any = load_settings(COMMANDS[command][0], name, {})
    for method in (*getattr(settings, "methods", ()), "baseline"):
        assert parse_method(method, 0.4, settings).name == method


def test_guidance_is_that_of_the_model() -> None:
    asked = ({}, {"model": "some/model"}, {"guidance_scale": 3.0})
    assert [RunSettings(**given).guidance_scale for given in asked] == [4.0, 7.5, 3.0]


def test_commands_sample_alike() -> None:
    sampled = [
        {
            key: getattr(COMMANDS[name][0](**({"speedup": 2} if name == "calibrate" else {})), key)
            for key in KEYS
        }
        for name in ("compare", "table", "check", "calibrate")
    ]
    assert sampled == [sampled[0]] * len(sampled)


KEYS = ("scheduler", "steps", "guidance_scale", "height", "width", "seed")


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_each_preset_of_a_study_is_valid(path: Path) -> None:
    others = {"latency_sd15_priced": PricedSettings, "subject": SubjectSettings}
    settings: Any = load_settings(others.get(path.stem, RunSettings), path, {})
    for method in getattr(settings, "methods", ()):
        assert parse_method(method, 0.4, settings).name == method
