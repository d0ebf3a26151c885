"""`agentsd-eval calibrate`: its file is what the API finds, and a goal is asked for before any work."""

from __future__ import annotations

from pathlib import Path

import pytest
from agentsd_eval.cli import app
from agentsd_eval.pictures import models
from typer.testing import CliRunner

from agentsd import Recipe, apply_agentsd, calibrate
from agentsd.calibration import calibrate_calls

RUN = ("--steps", 2, "--calls", 1, "--cost", "multiply_adds", "--scheduler", "model")


def invoke(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["calibrate", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return " ".join(result.output.split())


def test_the_command_saves_what_the_call_finds(pipe, model_folder: str, tmp_path: Path) -> None:
    path = tmp_path / "layers.yaml"
    printed = invoke("--model", model_folder, "--prompt", "a cat", "--speedup", 1.02, *RUN, "--out", path)
    found = Recipe.load(path)
    same = {"num_inference_steps": 2, "calls": 1, "cost": "multiply_adds", "height": 32, "width": 32}
    assert found == calibrate(pipe, ["a cat"], speedup=1.02, **same)
    assert found.measured["speedup"] >= 1.02
    assert f"{found.measured['speedup']:.3f}x" in printed
    assert "a cat" in printed
    assert str(path) in printed
    with apply_agentsd(pipe, recipe=path) as handle:
        assert set(handle.layer_names) == set(found.layers)


def test_the_command_saves_which_calls_are_full(pipe, model_folder: str, tmp_path: Path) -> None:
    path = tmp_path / "calls.yaml"
    arguments = ("--model", model_folder, "--prompt", "a cat", "--scheduler", "model", "--steps", 8)
    goal = ("--whole-calls", "--speedup", 1.5, "--cost", "multiply_adds", "--out", path)
    printed = invoke(*arguments, *goal)
    found = Recipe.load(path)
    same = {"num_inference_steps": 8, "height": 32, "width": 32}
    assert found == calibrate_calls(pipe, ["a cat"], speedup=1.5, **same)
    assert found.measured["speedup"] >= 1.5
    assert f"{found.measured['plan']} (8 calls: " in printed
    assert f"{found.measured['speedup']:.3f}x" in printed
    for row in found.measured["fewer_steps"]:
        assert f"stock, {row['steps']} steps" in printed
    assert str(path) in printed


def test_prompts_are_the_embedded_models_if_none_are_given(model_folder: str, tmp_path: Path) -> None:
    path = tmp_path / "layers.yaml"
    invoke("--model", model_folder, "--images", 2, "--max-error", 1.0, *RUN, "--out", path)
    assert len(Recipe.load(path).measured["prompts"]) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give one goal"),
        (("--speedup", 1.1, "--max-error", 0.1), "give one goal"),
        (("--speedup", 0.9), "speedup"),
        (("--max-distance", 0.1), "without --whole-calls, --max-error"),
        (("--whole-calls",), "with --whole-calls, --max-distance"),
        (("--whole-calls", "--max-error", 0.1), "with --whole-calls, --max-distance"),
        (("--whole-calls", "--speedup", 2, "--agent", "k=0.1"), "whole calls have no such setting"),
        (("--whole-calls", "--speedup", 2, "--steps", 5), "num_inference_steps=5: pass 8 or more"),
        (("--speedup", 9, "--agent", "late=none"), "unknown ['late']"),
    ],
)
def test_a_wrong_goal_is_one_message(
    arguments: tuple[object, ...], message: str, model_folder: str, tmp_path: Path
) -> None:
    printed = invoke("--model", model_folder, *arguments, "--out", tmp_path / "layers.yaml", code=2)
    assert message in printed
    assert not (tmp_path / "layers.yaml").exists()


@pytest.mark.parametrize("goal", [(), ("--speedup", 1.1, "--max-error", 0.1)])
def test_the_goal_is_looked_at_before_the_model_is_loaded(goal, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(models, "load_pipeline", lambda settings: pytest.fail("loaded"))
    assert "give one goal" in invoke(*goal, "--out", tmp_path / "layers.yaml", code=2)
