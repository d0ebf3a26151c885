"""Settings: command line over YAML over defaults; what is wrong is named with its way out."""

from pathlib import Path

import pytest
from agentsd_eval.cli import COMMANDS
from agentsd_eval.errors import EvalError
from agentsd_eval.files import read_lines
from agentsd_eval.images.methods import parse_method
from agentsd_eval.images.prompts import specs_of
from agentsd_eval.presets import load_settings, presets
from agentsd_eval.research.settings import PricedSettings, SubjectSettings, ValidationSettings
from agentsd_eval.settings import (
    CalibrateSettings,
    CheckSettings,
    CompareSettings,
    LatencySettings,
    RunSettings,
)
from agentsd_eval.studies import table

from agentsd.recipe import MODES


def write(folder, text):
    path = folder / "run.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_command_line_over_yaml_over_defaults(tmp_path):
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
        ("methods: [tome]", "unknown method 'tome'; did you mean tomesd"),
        ("model: ./nowhere", r"model = './nowhere': there is no such folder, and it is no hub id"),
        ("reference: ./nowhere", "there is no such folder"),
        ("device: toaster!", "device = 'toaster!': pass cpu, cuda, cuda:1 or mps"),
        ("height: 100", "height = 100: pass a multiple of 8"),
        ("- 1", "holds a list: write `name: value` lines"),
        ("a: [", "not valid YAML"),
        (b"model: \x00", "run.yaml is not valid YAML"),
        ("named: [1]", r"named = \[1\]: pass `name: value` lines"),
        ("named: {1: {k: 1}}", "named.*1"),
        ("named: {mine: 5}", "named.mine"),
        ("named: {mine: {recipe: 5}}", "write what a recipe's file holds"),
        ("named: {agentsd: {k: 0.1}}", "'agentsd' is a method already: choose another name"),
        ("named: {deepcache-7: {k: 0.1}}", "'deepcache-7' is a method already"),
        ("named: {mine: {k: [1]}}", "k=\\[1\\]: pass a number"),
        ("model: [" + "x, " * 500 + "]", r"model = .{1,125}\.\.\.: pass text"),
        ("base: gone.yaml", "can't read the configuration .*gone.yaml"),
        ("base: run.yaml", r"base: run.yaml -> run.yaml goes in a circle"),
        ("base: [1]", r"base = \[1\]: write the name of a file beside it"),
        ("seed: 99999999999999999999", "seed = 9+: pass less than"),
        ("steps: 1001", "steps = 1001: pass 1000 or less"),
        ("steps: " + "9" * 5000, "not valid YAML"),
        ("fewer_steps: [1.5]", "fewer_steps = 1.5: pass shares of the steps"),
    ],
)
def test_wrong_settings_are_one_message(tmp_path, text, message):
    with pytest.raises(EvalError, match=message) as told:
        load_settings(RunSettings, write(tmp_path, text), {})
    assert len(str(told.value)) < 1500


def test_text_that_is_none_is_told_with_its_place(tmp_path):
    (tmp_path / "prompts.txt").write_bytes(b"a cat\n\xff\n")
    with pytest.raises(EvalError, match=r"prompts.txt is not UTF-8 text \(invalid start byte at byte 6\)"):
        read_lines(tmp_path / "prompts.txt")


def test_a_setting_has_one_name(tmp_path):
    """In YAML its key, on the command line that with dashes; errors say it as it was given."""
    path = write(tmp_path, "guidance_scale: 3\nsteps: 0\n")
    for given, name in (({}, "steps = 0"), ({"steps": "-1"}, "--steps = -1")):
        with pytest.raises(EvalError, match=rf"(^|: ){name}: pass 1 or more"):
            load_settings(RunSettings, path, given)
    with pytest.raises(EvalError) as told:
        load_settings(ValidationSettings, None, {"chain_steps": [0]})
    assert str(told.value) == "--chain-steps = 0: pass 1 or more"


def test_a_presets_base_is_read_first_and_its_files_are_found(tmp_path):
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "classes.txt").write_text("kite\n")
    (tmp_path / "below" / "base.yaml").write_text("classes: classes.txt\nsteps: 7\nseed: 3\n")
    settings = load_settings(RunSettings, write(tmp_path, "base: below/base.yaml\nsteps: 9\n"), {})
    assert (settings.steps, settings.seed) == (9, 3)
    assert settings.classes == tmp_path / "below" / "classes.txt"


def test_a_base_that_is_not_beside_the_file_is_a_preset(tmp_path):
    path = write(tmp_path, "base: table11.yaml\nsteps: 9\n")
    assert load_settings(RunSettings, path, {}).methods[0] == "k-0"
    (tmp_path / "table11.yaml").write_text("methods: [todo]\n")  # one beside it comes first
    assert load_settings(RunSettings, path, {}).methods == ("todo",)


def test_presets_are_found_by_name_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load_settings(RunSettings, "table13", {}).out == Path("agentsd-results/table13")
    assert load_settings(RunSettings, "table10", {}).classes.read_text().startswith("tench\n")
    for name in ("tables10", "configs/table10.yaml"):
        with pytest.raises(EvalError, match=rf"{name}: no such file .* did you mean --config table10"):
            load_settings(RunSettings, name, {})
    (tmp_path / "table10").write_text("steps: 3\n")  # a file of one's own comes first
    assert load_settings(RunSettings, "table10", {}).steps == 3
    assert {"table13", "latency_sd15_gpu"} <= set(presets())
    assert not {"demo_model", "dreambooth_sd15"} & set(presets())


@pytest.mark.parametrize(("key", "value"), [("sizes", (100,)), ("sizes", (8,)), ("batches", (0,))])
def test_latency_sizes_and_batches_are_whole(key, value):
    with pytest.raises(EvalError, match=f"--{key} = "):
        load_settings(LatencySettings, None, {key: value})


def test_the_papers_presets_are_the_papers():
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


STUDIES = sorted((Path(__file__).parents[1] / "eval/research/presets").glob("*.yaml"))
OTHERS = {"latency_sd15_priced": PricedSettings, "subject": SubjectSettings}
LISTED = [
    *((COMMANDS[command][0], name) for name, preset in presets().items() for command in preset["commands"]),
    *((OTHERS.get(path.stem, RunSettings), path) for path in STUDIES),
]


@pytest.mark.parametrize(("kind", "preset"), LISTED)
def test_each_preset_is_valid_for_each_of_its_commands(kind, preset, monkeypatch):
    monkeypatch.setattr("agentsd_eval.settings.DRIVERS", (Path("/"),))  # as if there were a GPU
    settings = load_settings(kind, preset, {})
    for method in (*getattr(settings, "methods", ()), "baseline"):
        assert parse_method(method, 0.4, settings).name == method


def test_guidance_is_that_of_the_model():
    asked = ({}, {"model": "some/model"}, {"guidance_scale": 3.0})
    assert [RunSettings(**given).guidance_scale for given in asked] == [4.0, 7.5, 3.0]


def test_commands_sample_alike():
    keys = {"scheduler", "steps", "guidance_scale", "height", "width", "seed"}
    every = CompareSettings(), RunSettings(), CheckSettings(), CalibrateSettings(speedup=2)
    first, *others = (settings.model_dump(include=keys) for settings in every)
    assert others == [first] * 3
