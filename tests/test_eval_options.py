"""The command line is the settings': each has its option, help and default, at once and on a screen."""

import re
import subprocess
import sys
from importlib.metadata import version

import pytest
from agentsd_eval.cli import COMMANDS, main
from click.testing import CliRunner
from commands import invoke

from agentsd.command_line import settings_of


def shown(*words):
    result = CliRunner().invoke(main, list(words), terminal_width=80)
    assert result.exit_code == 0, result.output
    assert max(map(len, result.output.splitlines())) <= 80
    return result.output


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_is_a_screen_that_names_every_setting(name):
    kind, _ = COMMANDS[name]
    text = shown(name, "--help")
    assert len(text.splitlines()) <= 50
    optional = {key for key, field in kind.model_fields.items() if not field.is_required()}
    for key in optional - {*kind.hidden}:
        assert f"--{key.replace('_', '-')}" in re.sub(r"\n\s*", "", text)


def test_the_table_s_help_has_groups_and_defaults():
    text = re.sub(r"\s+", " ", shown("table", "--help"))
    for part in ("Model: --model", "Methods: --methods", "References: --reference", "[25]", "[0.8, 0.68,"):
        assert part in text


def test_the_first_page_names_every_command_whole():
    text = re.sub(r"\s+", " ", shown("--help"))
    assert all(f" {name} " in text for name in COMMANDS)


def test_the_version_and_the_presets_are_told():
    assert shown("--version").strip() == f"agentsd-eval {version('agentsd-eval')}"
    assert "agentsd-eval table --config table10" in invoke("--list-configs")


def test_nothing_heavy_is_loaded_for_the_help():
    heavy = "{'torch', 'diffusers', 'transformers', 'matplotlib', 'numpy'}"
    code = "import agentsd_eval.cli, agentsd.dreambooth.cli, sys; "
    code += f"sys.exit(' '.join({heavy} & set(sys.modules)) or 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert not done.stderr, done.stderr


def test_options_become_settings():
    options = {"steps": None, "methods": ("paper,tomesd", "todo"), "ratios": ("0.5,half",)}
    assert settings_of(options | {"fewer_steps": ("none",)}) == {
        "methods": ["paper", "tomesd", "todo"],
        "ratios": ["0.5", "half"],  # for the settings to read or refuse
        "fewer_steps": [],
    }
