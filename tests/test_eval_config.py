"""Settings: command line over YAML over defaults; what is wrong is named with its way out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from agentsd_eval.cli import COMMANDS
from agentsd_eval.cost import latency
from agentsd_eval.errors import EvalError
from agentsd_eval.images.methods import parse_method
from agentsd_eval.images.prompts import specs_of
from agentsd_eval.presets import load_settings, presets
from agentsd_eval.research.settings import PricedSettings
from agentsd_eval.settings import AblateSettings, CompareSettings, LatencySettings, RunSettings
from agentsd_eval.studies import ablate, table

CONFIGS = Path(__file__).parent.parent / "configs"


def write(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text)
    return path


def test_command_line_over_yaml_over_defaults(tmp_path: Path) -> None:
    path = write(tmp_path, "steps: 7\nseed: 3\n")
    settings = load_settings(RunSettings, path, {"steps": 9, "seed": None})
    assert (settings.steps, settings.seed, settings.guidance_scale) == (9, 3, 7.5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stepz: 7", "unknown key 'stepz'; did you mean 'steps'"),
        ("xyzzy: 7", "unknown key 'xyzzy'; known keys: model, dtype"),
        ("steps: 0", "steps = 0: Input should be greater than or equal to 1"),
        ("scheduler: heun", "'model', 'plms', 'ddim'"),
        ("named: {mine: gone.yaml}", r"mine: .*gone\.yaml isn't there"),
        ("named: {mine: {kk: 1}}", "unknown \\['kk'\\]"),
        ("named: {a+b: {k: 1}}", r"'a\+b' is empty or holds"),
        ("named: {mine: {scale: 0.54}}", "scale=0.54: it is the exponent"),
        ("height: 100", "height = 100: Input should be a multiple of 8"),
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


@pytest.mark.parametrize("name", ["demo", "table10", "table11", "table12", "table13"])
def test_presets_are_valid(name: str) -> None:
    settings = load_settings(RunSettings, CONFIGS / f"{name}.yaml", {})
    specs = specs_of(settings) if settings.classes else []
    assert len(specs) in (0, 2000)
    if name == "table10":
        assert specs[3].prompt == "A high quality photograph of a goldfish."
        assert specs[-1].prompt == "A high quality photograph of a toilet tissue."
        assert [m.label for m in table.table_methods(settings)][-1] == "agentsd r=0.5"
    for number, what in ((11, "k"), (12, "scale"), (13, "early")):
        if name == f"table{number}":
            values = ablate.PAPER_VALUES[what]
            assert (settings.ablate_values, settings.ratios) == (values, (0.1, 0.2, 0.3, 0.4, 0.5))
            varied = load_settings(AblateSettings, name, {"what": what})
            assert len(ablate.ablation_methods(varied)) == 1 + len(values)


@pytest.mark.parametrize("name", ["latency_sd15_gpu", "latency_sdxl_gpu"])
def test_presets_of_cost_are_valid(name: str) -> None:
    settings = load_settings(LatencySettings, CONFIGS / f"{name}.yaml", {})
    labels = [method.label for method in latency.methods_of(settings)]
    assert labels[0] == "baseline"
    assert "agents-then-downsample+deepcache" in labels


LISTED = [(name, command) for name, preset in presets().items() for command in preset.commands]
STUDIES = sorted((CONFIGS.parent / "eval/research/presets").glob("*.yaml"))


@pytest.mark.parametrize(("name", "command"), LISTED)
def test_each_preset_is_valid_for_each_of_its_commands(name: str, command: str) -> None:
    word, *given = command.split()
    kind, _ = COMMANDS[word]
    settings: Any = load_settings(kind, name, {"what": given[0]} if given else {})
    if not hasattr(settings, "named"):  # its methods are rows of tables
        return
    for method in (*getattr(settings, "methods", ()), "baseline"):
        assert parse_method(method, 0.4, settings).name == method


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_each_preset_of_a_study_is_valid(path: Path) -> None:
    settings = load_settings(PricedSettings if "priced" in path.stem else RunSettings, path, {})
    for method in settings.methods:
        assert parse_method(method, 0.4, settings).name == method
