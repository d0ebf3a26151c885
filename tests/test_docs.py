"""The documentation says what the tests and the code say; `.ci/run` builds the site, and checks its links."""

import ast
import re
from functools import partialmethod
from pathlib import Path

import pytest
import test_cache_hosts
import test_placement
import test_quantized
from pipelines import FEATURES, HOSTS, MORE
from quantized import PACKAGES
from sampling import SAMPLERS

import agentsd
from agentsd import apply_agentsd
from agentsd.apply import handle_of
from agentsd.recipe import AGENTSD, FAST, MODES

ROOT = Path(__file__).parents[1]


def read(path):
    return (ROOT / path).read_text(encoding="utf-8")


def python_of(path):
    """The Python blocks of a page."""
    return re.findall(r"```python\n(.*?)```", read(path), re.DOTALL)


def parameters(test, name):
    """What a test is parametrized with."""
    given = next(mark.args[1] for mark in test.pytestmark if mark.args[0] == name)
    return [one if isinstance(one, str) else one.values[0] for one in given]


def by_outcome(head, outcomes):
    """A table that lists under each outcome what has it."""
    found = {outcome: [one for one in outcomes if outcomes[one] == outcome] for outcome in outcomes.values()}
    rows = [f"| {outcome} | {'; '.join(dict.fromkeys(ones))} |" for outcome, ones in found.items()]
    return "\n".join([head, "|---|---|", *rows])


def hosts():
    """The table of pipelines."""
    compared = parameters(test_cache_hosts.test_host, "name")
    outcomes = {}
    for name in HOSTS | MORE:
        does = ["attention"] * (name in HOSTS) + ["step caching"] * (name in compared)
        if name in test_cache_hosts.WHOLE:
            does.append("step caching is disabled, with a warning")
        outcomes[name] = "; ".join(does)
    return by_outcome("| tested | pipelines |", outcomes)


def features():
    """The table of what may be switched on beside a recipe."""
    compared = parameters(test_cache_hosts.test_feature, "name")
    outcomes = {name: "attention" + "; step caching" * (name in compared) for name in FEATURES}
    for name in test_placement.OFFLOADS:
        outcomes[name if "casting" in name else f"{name} offloading"] = "attention; step caching"
    return by_outcome("| tested | features |", outcomes)


def quantised():
    """The table of quantised U-Nets."""
    recipes = set(parameters(test_quantized.test_a_recipe, "name"))
    assert {"paper", "step-caching", "steps and attention"} <= recipes
    outcome = "attention; step caching; trained weights only if loaded before"
    return by_outcome("| tested | quantised by |", dict.fromkeys(PACKAGES, outcome))


def samplers():
    """The table of samplers: what a run's cached steps do under each."""
    rows = {}  # outcome: {scheduler: its names}
    for name, sampling in SAMPLERS.items():
        kind = type(sampling.make()).__name__.removesuffix("Scheduler")
        rows.setdefault(sampling.says, {}).setdefault(kind, []).append(name)
    lines = ["| cached steps | schedulers |", "|---|---|"]
    for outcome, found in rows.items():
        shown = []
        for kind, names in found.items():
            elsewhere = sum(kind in other for other in rows.values()) > 1
            shown.append(f"`{kind}` ({names[0]})" if elsewhere and len(names) == 1 else f"`{kind}`")
        outcome = outcome.replace("says that noise is added", "a warning about its noise")
        outcome = outcome.replace("as it goes up", "since its timesteps go up")
        lines.append(f"| {outcome} | {', '.join(shown)} |")
    return "\n".join(lines)


@pytest.mark.parametrize("table", [hosts, features, quantised, samplers])
def test_a_table_of_compatibility_is_that_of_the_tests(table):
    assert f"\n{table()}\n" in read("docs/reference/compatibility.md")


def said(folder):
    """Every string of a package's code, one a line."""
    nodes = (node for path in (ROOT / folder).rglob("*.py") for node in ast.walk(ast.parse(path.read_text())))
    return "\n".join(n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str))


def test_messages_that_are_explained_are_those_of_the_code():
    quoted = re.findall(r"^\| `([^`]+)` \|", read("docs/how_to/troubleshoot.md"), re.MULTILINE)
    code = said("agentsd") + said("eval")
    assert len(quoted) > 20
    assert not [words for words in quoted if words not in code]


def test_the_drawing_shows_the_modes_runs():
    rows = re.findall(r'<g id="(\w+)">(.*?)</g>', read("docs/images/agentsd.svg"))
    runs = {name: re.findall(r'height="(\d+)" fill="(#\w+)"', row) for name, row in rows}
    assert [height == "44" for height, _ in runs["fast"]] == FAST.steps.full_steps(25)
    early = [colour for _, colour in runs["agentsd"]].count(runs["agentsd"][0][1])
    assert (len(runs["agentsd"]), early) == (25, 25 * AGENTSD.attention.early_frac)


def test_the_page_on_threads_runs(pipe, monkeypatch):
    """Each block in turn; the copy has its own U-Net, and a `with` block puts back what was there."""
    names = {"pipe": pipe, "prompt": "a cat"}
    monkeypatch.setattr(type(pipe), "__call__", partialmethod(type(pipe).__call__, num_inference_steps=2))
    outer = apply_agentsd(pipe, mode="fast")
    for block in python_of("docs/how_to/serve.md"):
        exec(block, names)
    assert names["make_image"]("a cat").size == names["image"].size
    assert handle_of(pipe) is outer
    assert names["mine"].unet is not pipe.unet
    assert handle_of(names["mine"]).recipe == AGENTSD


@pytest.mark.slow
def test_the_first_tutorial_runs():
    """In few steps."""
    names, blocks = {}, "\n".join(python_of("docs/tutorials/first_image.md"))
    exec(blocks.replace("num_inference_steps=25", "num_inference_steps=8"), names)
    assert names["image"].size == (128, 128)
    assert names["image"].tobytes() != names["baseline"].tobytes()
    assert handle_of(names["pipe"]) is None


def test_the_modes_of_the_page_are_those_of_the_code():
    """Its cells are Python: a schedule, a `StepCache`, a `ResidualSharing`."""
    page = read("docs/reference/recipe.md")
    rows = re.findall(r'^\| `"([a-z-]+)"` \| (.*?) \| (.*?) \| (.*?) *\|$', page, re.MULTILINE)
    assert [row[0] for row in rows] == list(MODES)
    names = {name: getattr(agentsd, name) for name in dir(agentsd)}
    for name, *cells in rows:
        codes = [re.findall(r"`(.+)`", cell) for cell in cells]
        attention, steps, residual = (eval(code[0], names) if code else None for code in codes)
        levels = 1 if "one level" in cells[0] else None
        assert MODES[name] == agentsd.Recipe(attention, steps=steps, residual=residual, levels=levels)
