"""The page's parts that need no gradio: what a chosen recipe is, and its line of Python."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from agentsd_eval.images.choice import LABELS, STEPS, defaults_of, python_of, recipe_from

from agentsd.apply import handle_of
from agentsd.recipe import FAST, MODES

CHANGES: dict[str, Any] = {"ratio": 0.55, "k": 0.0, "scale": -0.3, "early_frac": 0.9} | {
    "interval": 3,
    "late_interval": 4,
    "extrapolation_order": 0,
}


@pytest.mark.parametrize("mode", MODES)
def test_the_line_of_python_is_the_recipe(pipe: Any, mode: str) -> None:
    """Run as it is written, with each setting as it stands, changed alone, and changed with all others."""
    own = defaults_of(mode)
    assert set(CHANGES) == set(LABELS)
    for settings in ({}, CHANGES, *({name: CHANGES[name]} for name in own)):
        exec(python_of(mode, settings), {"pipe": pipe})
        handle = handle_of(pipe)
        assert handle is not None
        assert handle.recipe == recipe_from(mode, settings)
        assert (handle.recipe == MODES[mode]) == (not set(settings) & set(own))
    assert recipe_from(mode, own) == MODES[mode]


def test_what_a_recipe_has_not_is_left_out() -> None:
    assert python_of("fast", {"ratio": 0.5}).endswith('apply_agentsd(pipe, mode="fast")\n')
    assert python_of("agentsd", {"interval": 3}).endswith('apply_agentsd(pipe, mode="agentsd")\n')


def test_each_mode_offers_the_settings_that_it_has() -> None:
    assert set(defaults_of("agentsd")) == set(LABELS) - set(STEPS)
    assert set(defaults_of("fast")) == set(STEPS)
    assert python_of("agentsd", {"ratio": 0.5}).endswith('apply_agentsd(pipe, mode="agentsd", ratio=0.5)\n')
    line = python_of("fast", {"interval": 3})
    assert "StepCache(interval=3, warmup_steps=3, late_interval=6)" in line
    assert recipe_from("fast", {"interval": 3}) == replace(FAST, steps=replace(FAST.steps, interval=3))


@pytest.mark.parametrize(("name", "value"), [("ratio", 1.0), ("ratio", None), ("early_frac", 40.0)])
def test_a_bad_setting_is_named(name: str, value: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=f"{name}={value}"):
        recipe_from("agentsd", {name: value})
    with pytest.raises(ValueError, match="extrapolation_order=2: pass 0"):
        recipe_from("fast", {"extrapolation_order": 2})


def test_without_gradio_the_extra_is_named_before_any_work() -> None:
    code = (
        "import sys; sys.modules['gradio'] = None; sys.argv = ['agentsd-eval', 'app']\n"
        "from agentsd_eval.cli import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.strip() == "error: gradio is not installed: pip install 'gradio>=6'"
