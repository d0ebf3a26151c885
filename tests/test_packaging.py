"""What the three wheels hold."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from agentsd_eval.cli import main
from click.testing import CliRunner

import agentsd

ROOT = Path(__file__).parents[1]
PYPROJECTS = (ROOT / folder / "pyproject.toml" for folder in (".", "eval", "demo"))
PLUGIN, EVAL, DEMO = (tomllib.loads(path.read_text()) for path in PYPROJECTS)


def test_every_package_is_in_the_wheel():
    """An editable install would hide one that is not."""
    inside = (path.parent.relative_to(ROOT) for path in (ROOT / "agentsd").rglob("__init__.py"))
    assert sorted(PLUGIN["tool"]["setuptools"]["packages"]) == sorted(".".join(path.parts) for path in inside)


def test_every_file_of_the_evaluation_is_in_its_wheel():
    """All that git has of `eval/` and `configs/`, but for the results and research."""
    setup = EVAL["tool"]["setuptools"]
    held = {ROOT / "eval/pyproject.toml", ROOT / "eval/LICENSE"}
    for package in setup["packages"]:
        inside = package.removeprefix("agentsd_eval").replace(".", "/").strip("/")
        folder = ROOT / "eval" / setup["package-dir"].get(package, inside)
        for pattern in ("*.py", *setup["package-data"].get(package, [])):
            held |= {path.resolve() for path in folder.glob(pattern)}
    listed = ["git", "ls-files", "eval", "configs", ":!eval/results", ":!eval/research"]
    files = subprocess.check_output(listed, cwd=ROOT, text=True).splitlines()
    assert held == {ROOT / file for file in files}


def test_all_have_one_version():
    assert {project["project"]["version"] for project in (PLUGIN, EVAL, DEMO)} == {agentsd.__version__}
    assert f"agentsd=={agentsd.__version__}" in EVAL["project"]["dependencies"]
    cited = (ROOT / "CITATION.cff").read_text().split("\nversion: ")[1].split()[0]
    assert cited == agentsd.__version__


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_the_plugin_runs_without_the_extras():
    """As if what it does not need itself were not installed."""
    extras = ["pydantic", "click", "rich", "matplotlib", "tomesd", "DeepCache", "torchmetrics"]
    extras += ["agentsd_eval", "agentsd_demo"]
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({extras}))\n"
        "import agentsd, agentsd.modules, agentsd.plan\n"
        "from agentsd.recipe import MODES\n"
        "from agentsd import Recipe\n"
        "assert all(Recipe.from_mapping(r.to_mapping()) == r for r in MODES.values())"
    )
    done = run(code)
    assert done.returncode == 0, done.stderr


def test_a_missing_embedded_model_says_how_to_get_it(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "agentsd_demo", None)
    monkeypatch.delitem(sys.modules, "agentsd.demo", raising=False)
    with pytest.raises(ImportError) as error:
        import agentsd.demo  # noqa: F401
    done = CliRunner().invoke(main, ["compare", "--images", "1", "--out", str(tmp_path / "x.png")])
    assert done.exit_code == 2
    for said in (str(error.value), done.output):
        assert "the bundled toy model is a separate package" in said
        assert "pip install ./demo" in said


def test_dreambooth_without_its_extra_says_how_to_get_it():
    code = (
        "for missing in ('pydantic', 'click'):\n"
        "    sys.modules[missing] = None\n"
        "    try:\n"
        "        from agentsd.dreambooth.__main__ import main; main()\n"
        "    except SystemExit as end: print(end.code)\n"
        "    del sys.modules[missing]"
    )
    done = run("import sys\n" + code)
    assert done.stdout.split() == ["2", "2"]
    said = "error: {} is not installed: pip install {}\n"
    assert done.stderr == said.format("pydantic", "pydantic") + said.format("click", "click")


@pytest.mark.slow
def test_gpu_tests_are_found_where_other_tests_cannot_be_imported(tmp_path):
    """A machine with a GPU may lack what notebooks, random sequences and other packages' tests import."""
    for name in ("nbclient", "nbformat", "tgate", "DeepCache", "typer"):
        (tmp_path / f"{name}.py").write_text(f"raise ImportError({name!r})")
    words = ["-m", "pytest", "-m", "gpu", "--collect-only", "-q", "-p", "no:cacheprovider", "tests"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, *words], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("test_gpu.py::") >= 10
    assert "test_cuda_graphs.py::test_real_graphs_give_what_eager_calls_give" in done.stdout
