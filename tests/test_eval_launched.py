"""Under a launcher a command's processes share its work, or it is refused before any."""

import importlib
import subprocess
import sys
from types import SimpleNamespace

import pytest
from accelerate.utils import get_int_from_env
from agentsd_eval.cli import COMMANDS, main
from agentsd_eval.research.__main__ import COMMANDS as STUDIES
from agentsd_eval.research.__main__ import main as studies
from agentsd_eval.settings import processes
from commands import invoke

SHARED = {"table", "check", "metric-validation"}
ALL = dict.fromkeys(COMMANDS, main) | dict.fromkeys(STUDIES, studies)
ARGUMENTS = {"calibrate": ["--speedup", "1.2"], "fid": [".", "."], "report": ["."], "intervals": ["."]}
SIZES = "WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE"


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ALL)
def test_what_is_not_shared_is_refused(name, size, monkeypatch):
    began, load = [], importlib.import_module
    command = SimpleNamespace(command=lambda settings, console: began.append(name))
    found = lambda word, *of: command if word.startswith(".") else load(word, *of)  # noqa: E731
    monkeypatch.setattr(importlib, "import_module", found)
    words, program = [name, *ARGUMENTS.get(name, [])], ALL[name]
    monkeypatch.setenv(size, "1")
    invoke(*words, program=program)
    monkeypatch.setenv(size, "2")
    if name in SHARED:
        invoke(*words, program=program)
        assert len(began) == 2
    else:
        told = invoke(*words, program=program, code=2)
        assert told.startswith("error: 2 processes: ")
        assert told.endswith("start it without accelerate launch")
        assert len(began) == 1


@pytest.mark.parametrize("size", SIZES)
def test_they_are_counted_as_accelerate_does(size, monkeypatch):
    for other in SIZES:
        monkeypatch.delenv(other, raising=False)
    assert processes() == get_int_from_env(SIZES, 1) == 1
    monkeypatch.setenv(size, "3")
    assert processes() == get_int_from_env(SIZES, 1) == 3
    monkeypatch.setenv(size, "")
    assert processes() == 1


@pytest.mark.slow
def test_two_real_processes_of_a_command_that_is_one_processs():
    launch = ["torch.distributed.run", "--nproc_per_node", "2", "-m", "agentsd_eval.cli", "compare"]
    done = subprocess.run([sys.executable, "-m", *launch], capture_output=True, text=True, timeout=300)
    assert done.returncode != 0
    assert "error: 2 processes: " in done.stderr
