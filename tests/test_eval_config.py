"""Settings: command line over YAML over defaults; what is wrong is named with its way out."""

from __future__ import annotations

from pathlib import Path

import pytest
from agentsd_eval.config import CompareSettings, LatencySettings, TableSettings, load_settings
from agentsd_eval.errors import EvalError

CONFIGS = Path(__file__).parent.parent / "configs"


def write(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text)
    return path


def test_command_line_over_yaml_over_defaults(tmp_path: Path) -> None:
    path = write(tmp_path, "steps: 7\nseed: 3\nagent: {k: 0.1, late: none}\n")
    settings = load_settings(TableSettings, path, {"steps": 9, "seed": None, "agent": {"k": 0.2}})
    assert (settings.steps, settings.seed, settings.guidance_scale) == (9, 3, 7.5)
    assert settings.agent == {"k": 0.2, "late": "none"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stepz: 7", "unknown key 'stepz'; known keys: model, dtype"),
        ("steps: 0", "steps = 0: Input should be greater than or equal to 1"),
        ("scheduler: heun", "'model', 'plms', 'ddim'"),
        ("agent: {ratio: 0.5}", "unknown \\['ratio'\\]; known: agent_ratio"),
        ("agent: {scale: 0.54}", "scale=0.54: it is the exponent"),
        ("agent: {k: many}", "k='many' is a str: pass a float"),
        ("height: 100", "height = 100: Input should be a multiple of 8"),
        ("template: a photo", "a template holds {cls}"),
        ("- 1", "must hold `key: value` lines; it holds a list"),
        ("a: [", "not valid YAML"),
    ],
)
def test_wrong_settings_are_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(EvalError, match=message):
        load_settings(TableSettings, write(tmp_path, text), {})


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(EvalError, match=r"can't read the configuration .*gone\.yaml: No such file"):
        load_settings(CompareSettings, tmp_path / "gone.yaml", {})


@pytest.mark.parametrize(("key", "value"), [("sizes", (100,)), ("sizes", (8,)), ("batches", (0,))])
def test_latency_sizes_and_batches_are_whole(key: str, value: tuple[int, ...]) -> None:
    with pytest.raises(EvalError, match=key):
        load_settings(LatencySettings, None, {key: value})
