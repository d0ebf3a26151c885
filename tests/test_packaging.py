"""What the two wheels hold."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import agentsd

ROOT = Path(__file__).parents[1]
PLUGIN, DEMO = (tomllib.loads((ROOT / f / "pyproject.toml").read_text()) for f in (".", "demo"))


def test_every_package_is_in_the_wheel() -> None:
    """An editable install would hide one that is not."""
    found = []
    for name, folder in (("agentsd", "agentsd"), ("agentsd_eval", "eval")):
        inside = (path.parent.relative_to(ROOT / folder) for path in (ROOT / folder).rglob("__init__.py"))
        found += [".".join((name, *path.parts)) for path in inside]
    assert sorted(PLUGIN["tool"]["setuptools"]["packages"]) == sorted([*found, "agentsd_eval.configs"])


def test_both_have_one_version() -> None:
    assert PLUGIN["project"]["version"] == DEMO["project"]["version"] == agentsd.__version__
    cited = (ROOT / "CITATION.cff").read_text().split("\nversion: ")[1].split()[0]
    assert cited == agentsd.__version__


def test_the_plugin_needs_seven_packages() -> None:
    names = {requirement.split(">")[0] for requirement in PLUGIN["project"]["dependencies"]}
    assert names == {"accelerate", "diffusers", "numpy", "pyyaml", "safetensors", "torch", "transformers"}


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


# What the plugin itself does not need, as if it were not installed.
HIDE = "import sys\nsys.modules.update(dict.fromkeys({hidden}))\n"
EXTRAS = ["pydantic", "typer", "rich", "matplotlib", "tomesd", "DeepCache", "torchmetrics", "agentsd_demo"]


def test_the_plugin_runs_without_the_extras() -> None:
    extras = {
        "pydantic",
        "typer",
        "rich",
        "matplotlib",
        "tomesd",
        "DeepCache",
        "torchmetrics",
        "agentsd_demo",
    }
    code = HIDE.format(hidden=extras) + (
        "import agentsd, agentsd.modules, agentsd.reuse\n"
        "from agentsd.recipe import MODES\n"
        "from agentsd import Recipe\n"
        "assert all(Recipe.from_mapping(r.to_mapping()) == r for r in MODES.values())"
    )
    done = run(code)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("code", ["import agentsd.demo", "from agentsd_eval.cli import main; main()"])
def test_a_missing_embedded_model_says_how_to_get_it(code: str) -> None:
    setup = "sys.argv = ['agentsd-eval', 'compare', '--images', '1', '--out', '/tmp/x.png']\n"
    done = run(HIDE.format(hidden=["agentsd_demo"]) + setup + code)
    assert done.returncode != 0
    assert "the embedded model is a distribution of its own" in done.stderr + done.stdout
    assert "pip install ./demo" in done.stderr + done.stdout
    if "cli" in code:
        assert "Traceback" not in done.stderr
