"""The search over the latent-distance schedule."""

from __future__ import annotations

from pathlib import Path

import pytest
from agentsd_eval.cli import app
from agentsd_eval.errors import EvalError
from agentsd_eval.settings import MediatorSettings
from agentsd_eval.studies.mediators import draw, envelope, methods_of, thresholds_of
from typer.testing import CliRunner

from agentsd import PooledAgents


def test_every_falling_choice_once() -> None:
    assert list(thresholds_of(2, 0.5)) == [(1.0,), (0.5,), (0.0,)]
    choices = list(thresholds_of(3, 0.1))
    assert len(choices) == len(set(choices)) == 66  # as in the paper: 11 + 10 + ... + 1
    assert all(1 >= a >= b >= 0 for a, b in choices)
    assert list(thresholds_of(1, 0.5)) == [()]


def test_the_rows_of_a_search() -> None:
    methods = methods_of(MediatorSettings(mediator_counts=(4, 16), mediator_step=0.5, fewer_steps=()))
    assert [method.name for method in methods] == [
        "baseline",
        "mediators 1",
        "mediators 0.5",
        "mediators 0",
    ]
    assert len({method.key for method in methods}) == 4
    assert methods[1].recipe.attention.stages == (PooledAgents(4), PooledAgents(16))
    with pytest.raises(EvalError, match="--agent early_frac: mediators have k and scale alone"):
        methods_of(MediatorSettings(agent={"early_frac": 0.5}))


def test_the_envelope_is_what_nothing_beats() -> None:
    points = [(3.0, 5.0), (1.0, 9.0), (2.0, 9.5), (2.5, 6.0), (4.0, 5.0), (5.0, 1.0)]
    assert envelope(points) == [(1.0, 9.0), (2.5, 6.0), (3.0, 5.0), (5.0, 1.0)]
    rows = [{"method": f"mediators {x}, 0", "macs": 1e9 * x, "fd": y} for x, y in points]
    few = [{"method": name, "macs": 1e9, "fd": 0.5} for name in ("baseline", "baseline@5")]
    axes = draw([*few, *rows], "efficientnet-lite0").axes[0]
    assert axes.get_ylabel() == "FD (efficientnet-lite0, 48 components)"
    assert len(axes.lines[0].get_xdata()) == 4
    assert [text.get_text() for text in axes.texts] == [
        "1.0, 0", "2.5, 0", "3.0, 0", "5.0, 0", "baseline", "baseline@5",
    ]  # fmt: skip


def test_the_command(model_folder: str, photographs: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("a cat\na dog\n")
    arguments = [
        "mediators", "--model", model_folder, "--prompts", tmp_path / "prompts.txt", "--reference",
        photographs, "--images", 2, "--steps", 2, "--count", 4, "--count", 16, "--threshold-step", 1,
        "--out", tmp_path / "run",
    ]  # fmt: skip
    result = CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert (tmp_path / "run" / "mediators.png").exists()
    table = (tmp_path / "run" / "mediators.md").read_text()
    assert "| thresholds 1 |" in table
    assert "GMACs/img" in table
