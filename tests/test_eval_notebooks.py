"""The notebooks run from top to bottom."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path: Path, tmp_path: Path, monkeypatch: Any) -> None:
    # so that `agentsd-eval` is the one beside this Python
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    notebook = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": tmp_path}})
    client.execute()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_committed_outputs_hold_no_error_no_warning_and_no_path_of_a_machine(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert not [
        output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"
    ]
    assert not re.search(r"/(home|root|usr|work)/", "".join(output.get("text", "") for output in outputs))
