"""The commands of agentsd-eval as a user gives them."""

import json

from agentsd_eval.cli import main
from click.testing import CliRunner

ALONE = ("--fewer-steps", "none", "--samplers", "none", "--reference-steps", "none")
"""No rows but the methods' own, and no reference images."""


def run(*words, code=0, program=main):
    """Run a command, which has to end with this exit code."""
    result = CliRunner().invoke(program, list(map(str, words)), catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result


def invoke(*words, code=0, program=main):
    """Run a command; return all that it printed, in one line."""
    return " ".join(run(*words, code=code, program=program).output.split())


def rows_of(path):
    """The rows of a file of JSON lines."""
    return list(map(json.loads, path.read_text(encoding="utf-8").splitlines()))
