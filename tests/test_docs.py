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


def by_outcome(head: str, outcomes: dict[str, str]) -> str:
    """A table that lists under each outcome what has it."""
    found = {outcome: [one for one in outcomes if outcomes[one] == outcome] for outcome in outcomes.values()}
    rows = [f"| {outcome} | {'; '.join(dict.fromkeys(ones))} |" for outcome, ones in found.items()]
    return "\n".join([head, "|---|---|", *rows])


def hosts() -> str:
    """The table of pipelines."""
    compared = parameters(test_cache_hosts.test_host, "name")
    outcomes = {}
    for name in HOSTS | MORE:
        does = ["attention"] * (name in HOSTS) + ["step caching"] * (name in compared)
        if name in test_cache_hosts.WHOLE:
            does.append("step caching is disabled, with a warning")
        outcomes[name] = "; ".join(does)
    return by_outcome("| tested | pipelines |", outcomes)


def features() -> str:
    """The table of what may be switched on beside a recipe."""
    compared = parameters(test_cache_hosts.test_feature, "name")
    outcomes = {name: "attention" + "; step caching" * (name in compared) for name in FEATURES}
    for name in test_placement.OFFLOADS:
        outcomes[name if "casting" in name else f"{name} offloading"] = "attention; step caching"
    return by_outcome("| tested | features |", outcomes)


def quantised() -> str:
    """The table of quantised U-Nets."""
    recipes = set(parameters(test_quantized.test_a_recipe, "name"))
    assert {"paper", "step-caching", "steps and attention"} <= recipes
    outcome = "attention; step caching; trained weights only if loaded before"
    return by_outcome("| tested | quantised by |", dict.fromkeys(PACKAGES, outcome))


def samplers() -> str:
    """The table of samplers: what a run's cached steps do under each."""
    kinds = {
        name: type(sampling.make()).__name__.removesuffix("Scheduler") for name, sampling in SAMPLERS.items()
    }
    says = {name: sampling.says for name, sampling in SAMPLERS.items()}
    rows: dict[str, dict[str, list[str]]] = {}
    for name, kind in kinds.items():
        rows.setdefault(says[name], {}).setdefault(kind, []).append(name)
    lines = ["| cached steps | schedulers |", "|---|---|"]
    for outcome, found in rows.items():
        several = {kind for kind in found if sum(kind in other for other in rows.values()) > 1}
        shown = [
            f"`{k}`" + f" ({'; '.join(found[k])})" * (k in several and len(found[k]) == 1) for k in found
        ]
        outcome = outcome.replace("says that noise is added", "a warning about its noise")
        outcome = outcome.replace("as it goes up", "since its timesteps go up")
        lines.append(f"| {outcome} | {', '.join(shown)} |")
    return "\n".join(lines)


def test_the_tables_of_hosts_are_those_of_the_tests() -> None:
    page = (ROOT / "docs/reference/compatibility.md").read_text(encoding="utf-8")
    assert f"\n{hosts()}\n" in page
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
    assert [height == "44" for height, _ in runs["fast"]] == FAST.steps.full_steps(25)
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
