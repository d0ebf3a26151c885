"""The documentation says what the tests and the code say; `.ci/run` builds the site, and checks its links."""

from __future__ import annotations

import ast
import re
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
import test_cache_hosts
import test_placement
import test_quantized
from pipelines import FEATURES, HOSTS, MORE
from quantized import PACKAGES
from recipes import STEP_CACHING
from sampling import SAMPLERS

import agentsd
from agentsd import apply_agentsd
from agentsd.apply import handle_of
from agentsd.recipe import AGENTSD, FAST, MODES

ROOT = Path(__file__).parents[1]


def parameters(test: Any, name: str) -> list[str]:
    """What a test is parametrized with."""
    given = next(mark.args[1] for mark in test.pytestmark if mark.args[0] == name)
    return [one if isinstance(one, str) else one.values[0] for one in given]


def hosts(tokenizer: Any) -> str:
    """The table of pipelines: each is built, to ask for its class."""
    lines = ["| host | pipeline | attention | step caching |", "|---|---|---|---|"]
    whole = {name: f"disabled, with a warning: {why}" for name, why in test_cache_hosts.WHOLE.items()}
    compared = parameters(test_cache_hosts.test_host, "name")
    for name, make in (HOSTS | MORE).items():
        attention = "yes" if name in HOSTS else ""
        calls = whole.get(name, "yes" if name in compared else "")
        if name == "InstructPix2Pix":  # three passes
            calls = "steps alone"
        lines.append(f"| {name} | `{make(tokenizer)[0].__name__}` | {attention} | {calls} |")
    return "\n".join(lines)


def features() -> str:
    """The table of what may be switched on beside a recipe."""
    lines = ["| feature | attention | step caching |", "|---|---|---|"]
    compared = parameters(test_cache_hosts.test_feature, "name")
    for name in FEATURES:
        lines.append(f"| {name} | yes | {'yes' if name in compared else ''} |")
    for name in test_placement.OFFLOADS:
        title = name if "casting" in name else f"{name} offloading"
        lines.append(f"| {title} | yes | yes |")
    return "\n".join(lines)


def quantised() -> str:
    """The table of quantised U-Nets."""
    recipes, trained = parameters(test_quantized.test_a_recipe, "name"), "refused; load them, then quantise"
    attention = "yes" if {"paper", "steps and attention"} <= set(recipes) else ""
    calls = "yes" if {"step-caching", "steps and attention"} <= set(recipes) else ""
    lines = ["| quantised by | attention | step caching | trained weights |", "|---|---|---|---|"]
    lines += [f"| {name} | {attention} | {calls} | {trained} |" for name in PACKAGES]
    return "\n".join(lines)


def samplers() -> str:
    """The table of samplers: what a run's cached steps do under each."""
    lines = ["| sampler | diffusers | predictions | cached steps |", "|---|---|---|---|"]
    for name, sampling in SAMPLERS.items():
        kind = type(sampling.make()).__name__
        lines.append(f"| {name} | `{kind}` | {', '.join(sampling.predictions)} | {sampling.says} |")
    return "\n".join(lines)


def test_the_tables_of_hosts_are_those_of_the_tests(tokenizer: Any) -> None:
    page = (ROOT / "docs/reference/compatibility.md").read_text(encoding="utf-8")
    assert f"\n{hosts(tokenizer)}\n" in page
    assert f"\n{features()}\n" in page
    assert f"\n{quantised()}\n" in page
    assert f"\n{samplers()}\n" in page


def said(folder: str) -> str:
    """Every string of a package's code, one a line."""
    nodes = (node for path in (ROOT / folder).rglob("*.py") for node in ast.walk(ast.parse(path.read_text())))
    return "\n".join(n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str))


def test_messages_that_are_explained_are_those_of_the_code() -> None:
    page = (ROOT / "docs/how_to/troubleshoot.md").read_text(encoding="utf-8")
    quoted = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    code = said("agentsd") + said("eval")
    assert len(quoted) > 20
    assert not [words for words in quoted if words not in code]


def test_the_drawing_shows_the_modes_runs() -> None:
    drawing = (ROOT / "docs/images/agentsd.svg").read_text(encoding="utf-8")
    runs = {
        name: re.findall(r'height="(\d+)" fill="(#\w+)"', row)
        for name, row in re.findall(r'<g id="(\w+)">(.*?)</g>', drawing)
    }
    assert [height == "44" for height, _ in runs["fast"]] == FAST.steps.computed(25)
    early = [colour for _, colour in runs["agentsd"]].count(runs["agentsd"][0][1])
    assert (len(runs["agentsd"]), early) == (25, 25 * AGENTSD.attention.early_frac)


def test_the_page_on_threads_runs(pipe: Any, monkeypatch: Any) -> None:
    """Each block in turn; the copy has its own U-Net, and a `with` block puts back what was there."""
    page = (ROOT / "docs/how_to/serve.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {"pipe": pipe, "prompt": "a cat"}
    monkeypatch.setattr(type(pipe), "__call__", partialmethod(type(pipe).__call__, num_inference_steps=2))
    outer = apply_agentsd(pipe, mode="fast")
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(compile(block, "docs/how_to/serve.md", "exec"), names)
    assert names["make_image"]("a cat").size == names["image"].size
    assert handle_of(pipe) is outer
    assert names["mine"].unet is not pipe.unet
    copied = handle_of(names["mine"])
    assert copied is not None
    assert copied.recipe == AGENTSD


@pytest.mark.slow
def test_the_first_tutorial_runs() -> None:
    """On a small image in few steps, where `fast` is step caching."""
    page = (ROOT / "docs/tutorials/first_image.md").read_text(encoding="utf-8")
    blocks = "\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL))
    names: dict[str, Any] = {}
    small = blocks.replace("=128", "=64").replace("num_inference_steps=25", "num_inference_steps=8")
    exec(compile(small, "docs/tutorials/first_image.md", "exec"), names)
    assert names["image"].size == (64, 64)
    assert names["image"].tobytes() != names["baseline"].tobytes()
    assert handle_of(names["pipe"]) is None


def test_the_modes_of_the_page_are_those_of_the_code() -> None:
    """Its cells are Python: a schedule, a `StepCache`, a `ResidualSharing`."""
    page = (ROOT / "docs/reference/recipe.md").read_text(encoding="utf-8")
    rows = re.findall(r'^\| `"([a-z-]+)"` \| (.*?) \| (.*?) \| (.*?) *\|$', page, re.MULTILINE)
    assert [row[0] for row in rows] == list(MODES)
    names = {name: getattr(agentsd, name) for name in dir(agentsd)}
    for name, *cells in rows:
        attention, steps, residual = (re.findall(r"`(.+)`", cell) for cell in cells)
        recipe = MODES[name]
        assert recipe.attention == (eval(attention[0], names) if attention else None)
        assert recipe.residual == (eval(residual[0], names) if residual else None)
        if steps and "StepCache" in steps[0]:
            assert recipe.steps == eval(steps[0], names)
        else:
            assert recipe.steps == (STEP_CACHING.steps if steps else None)
