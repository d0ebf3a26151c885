"""The notebooks run from top to bottom, and show what they print today."""

import os
import re
import sys
from pathlib import Path

import nbclient
import nbformat
import pytest

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
SECONDS = re.compile(r"-?\d+(?:\.\d+)?(?= s\b)|/tmp/\w+")


def printed(cell):
    """The words of a cell's outputs. Seconds and folders differ from run to run, and blanks with them."""
    texts = []
    for output in cell.get("outputs", []):
        if output.get("name") == "stderr":  # warnings of this machine's packages
            continue
        data = output.get("data", {})
        texts.append(output.get("text") or data.get("text/markdown") or data.get("text/plain", ""))
    return words("\n".join(texts))


def words(text):
    """A text without what packages say by themselves: rich of ipywidgets, bitsandbytes of a CPU."""
    said = r"\S+ UserWarning: .*?warnings\.warn\([^\n]*|[^\n]*kernels-community[^\n]*"
    return " ".join(SECONDS.sub("?", re.sub(said, "", text, flags=re.S)).split())


def differs(now, shown):
    """Whether the words differ, or a number by more than another machine's rounding makes of it."""
    if NUMBER.sub("#", now) != NUMBER.sub("#", shown):
        return True
    pairs = zip(NUMBER.findall(now), NUMBER.findall(shown), strict=True)
    return any(float(a) != pytest.approx(float(b), rel=0.03, abs=0.02) for a, b in pairs)


@pytest.mark.parametrize(
    ("now", "shown", "expected"),
    [
        ("distance 1.36", "distance 1.37", False),
        ("distance 1.36", "distance 1.50", True),
        ("FFfF (4 calls)", "FFFF (4 calls)", True),
        ("Recipe(ratio=0.5)", "Recipe(ratio=0.4)", True),
    ],
)
def test_what_differs(now, shown, expected):
    assert differs(now, shown) == expected


def test_what_packages_say_is_left_out():
    said = "/rich/live.py:260: UserWarning: install for\nJupyter support\n warnings.warn('install')\n"
    assert words(f"before 1.2 s\n{said}\nFailed kernels-community: No\nafter") == "before ? s after"


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_shows_what_it_prints_today(path, tmp_path, monkeypatch):
    # so that `agentsd-eval` is the one beside this Python
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    notebook = nbformat.read(path, as_version=4)
    shown = [printed(cell) for cell in notebook.cells]
    client = nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": tmp_path}})
    client.execute()
    now = [printed(cell) for cell in notebook.cells]
    for cell, text, before in zip(notebook.cells, now, shown, strict=True):
        if "speeds" in cell.metadata.get("tags", ()):  # which are another machine's
            text, before = (NUMBER.sub("#", words) for words in (text, before))
        assert not differs(text, before), f"{before}\n\nis now\n\n{text}"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_committed_outputs_hold_no_error_no_warning_and_no_path_of_a_machine(path):
    notebook = nbformat.read(path, as_version=4)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert not [one for one in outputs if one.output_type == "error" or one.get("name") == "stderr"]
    assert not re.search(r"/(home|root|usr|work)/", "".join(output.get("text", "") for output in outputs))
