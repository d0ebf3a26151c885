"""Under a launcher a command's processes share its work, or it is refused before any."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from accelerate.utils import get_int_from_env
from agentsd_eval.cli import COMMANDS, main
from agentsd_eval.research.__main__ import COMMANDS as STUDIES
from agentsd_eval.research.__main__ import main as studies
from agentsd_eval.settings import processes
from click.testing import CliRunner

SHARED = {"table", "check", "metric-validation"}
ALL = dict.fromkeys(COMMANDS, main) | dict.fromkeys(STUDIES, studies)
ARGUMENTS = {"calibrate": ["--speedup", "1.2"], "fid": [".", "."], "report": ["."]}
SIZES = "WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE"


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ALL)
def test_what_is_not_shared_is_refused(name: str, size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    began: list[str] = []

    def begun(settings: Any, console: Any) -> None:
        began.append(name)

    load, command = importlib.import_module, SimpleNamespace(command=begun)
    monkeypatch.setattr(
        importlib, "import_module", lambda word, *of: command if word[0] == "." else load(word, *of)
    )
    for count in ("1", "2"):
        monkeypatch.setenv(size, count)
        result = CliRunner().invoke(ALL[name], [name, *ARGUMENTS.get(name, [])])
        refused = count == "2" and name not in SHARED
        assert result.exit_code == (2 if refused else 0), result.output
        assert len(began) == (0 if refused else 1)
        if refused:
            assert result.output.startswith("error: 2 processes: ")
            assert result.output.endswith("start it without accelerate launch\n")
        began.clear()


@pytest.mark.parametrize("size", SIZES)
def test_they_are_counted_as_accelerate_does(size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for other in SIZES:
        monkeypatch.delenv(other, raising=False)
    assert processes() == get_int_from_env(SIZES, 1) == 1
    monkeypatch.setenv(size, "3")
    assert processes() == get_int_from_env(SIZES, 1) == 3
    monkeypatch.setenv(size, "")
    assert processes() == 1


@pytest.mark.slow
def test_two_real_processes_of_a_command_that_is_one_processs() -> None:
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc_per_node",
        "2",
        "-m",
        "agentsd_eval.cli",
    ]
    done = subprocess.run([*launch, "compare"], env=os.environ, capture_output=True, text=True, timeout=300)
    assert done.returncode != 0
    assert "error: 2 processes: " in done.stderr
