"""The command line is the settings': each has its option, help and default, at any width, at once."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import version

import pytest
from agentsd_eval.cli import COMMANDS, app
from agentsd_eval.options import settings_of
from agentsd_eval.settings import Option, RunSettings
from typer.testing import CliRunner


def shown(*words: str) -> str:
    result = CliRunner().invoke(app, list(words), terminal_width=80)
    assert result.exit_code == 0, result.output
    assert max(map(len, result.output.splitlines())) <= 80
    return result.output


@pytest.mark.parametrize("name", COMMANDS)
def test_each_setting_stands_in_the_help_with_its_default(name: str) -> None:
    kind, _ = COMMANDS[name]
    text = shown(name, "--help")
    assert "…" not in text
    flat = re.sub(r"\s+", " ", text)
    for key, field in kind.model_fields.items():
        mark = next((mark for mark in field.metadata if isinstance(mark, Option)), None)
        if key in kind.hidden or key == "named":
            continue
        if mark and mark.positional:
            assert mark.name in flat
            continue
        flag = f"--{mark.name if mark else key.replace('_', '-')}"
        assert flag in flat
        if isinstance(field.default, int | float) and not isinstance(field.default, bool):
            assert f"[default: {field.default}]" in flat.partition(flag)[2]


def test_the_first_page_names_every_command_whole() -> None:
    text = shown("--help")
    assert "..." not in text.replace("[ARGS]...", "")
    for name, (kind, _) in COMMANDS.items():
        first = re.sub(r"\s+", " ", str(kind.__doc__).partition("\n\n")[0])
        assert f"{name} {first}" in re.sub(r"\s+", " ", text)


def test_the_version_and_the_presets_are_told() -> None:
    assert shown("--version").strip() == f"agentsd-eval {version('agentsd-eval')}"
    result = CliRunner().invoke(app, ["--list-configs"])
    assert "agentsd-eval ablate k --config full" in result.output


def test_nothing_heavy_is_loaded_for_the_help() -> None:
    heavy = "{'torch', 'diffusers', 'transformers', 'matplotlib', 'numpy', 'agentsd'}"
    code = f"import sys; from agentsd_eval import cli; sys.exit(' '.join({heavy} & set(sys.modules)) or 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert not done.stderr, done.stderr


def test_options_become_settings() -> None:
    given = settings_of(
        {
            "steps": None,
            "methods": ["none"],
            "ratios": ["0.5", "half"],
            "fewer_steps": ["none"],
            "agent": ["k=0.1", "seed=2"],
        },
        RunSettings,
    )
    assert given == {
        "methods": ["none"],
        "ratios": [0.5, "half"],  # for the settings to refuse
        "fewer_steps": (),
        "agent": {"k": 0.1, "seed": 2},
    }
