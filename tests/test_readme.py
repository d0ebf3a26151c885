"""README's and docs' figures are those of the committed results; links lead somewhere; pages are small."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

import pytest
import yaml
from PIL import Image

ROOT = Path(__file__).parents[1]
FIGURES = runpy.run_path(str(ROOT / "docs/figures.py"))
PAGES = [str(page.relative_to(ROOT)) for page in FIGURES["PAGES"]]
OURS = re.compile(r"\d\.\d+x|\d \([\d.]+-[\d.]+\)|\d+(\.\d+)? dB")
"""A ratio, an interval, a likeness."""
SOURCE = re.compile(r"\]\([^)]*(eval/results|speed\.md|table\.md)[^)]*\)")


@pytest.mark.parametrize("page", PAGES)
def test_figures_are_those_of_the_results(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert FIGURES["written"](text, ROOT / page) == text, "run `python docs/figures.py`"


@pytest.mark.parametrize("page", PAGES)
def test_no_line_of_text_begins_with_a_comment(page: str) -> None:
    """In Markdown such a line is raw HTML: backticks and links in it are shown as they are."""
    assert not re.findall(r"(?m)^<!--.*-->[^\S\n]*\S.*$", (ROOT / page).read_text(encoding="utf-8"))


def test_a_figure_that_differs_is_put_right() -> None:
    figures = "<!--=baseline macs-->7<!--=--> <!--=deepcache-2 gain-range-->?<!--=-->"
    text = f"<!-- figures of benchmark-64 -->\n{figures}"
    first, second = re.findall(r"-->([^<]+)<!--=-->", FIGURES["written"](text))
    assert first == "1.00"
    assert re.fullmatch(r"\d\.\d\d \(\d\.\d\d-\d\.\d\d\)", second)


def test_every_row_of_the_tables_is_one_that_some_run_has() -> None:
    """A table leaves out what its run lacks, so a name that is mistyped would never be missed."""
    tables = FIGURES["TABLES"].values()
    found = {label for table in tables for label in FIGURES["rows_of"](table["run"])}
    paths = [*(ROOT / "configs").glob("*.yaml"), *(ROOT / "eval/research/presets").glob("*.yaml")]
    configs = [yaml.safe_load(path.read_text(encoding="utf-8")) for path in paths]
    found |= {method for config in configs if config for method in config.get("methods", ())}
    wanted = {label for table in tables for label in table["rows"].values()}
    assert not wanted - found


def test_one_workload_has_one_number_of_seconds() -> None:
    """Two machines' seconds of the same images on two pages would look like a contradiction."""
    timed = {
        table["run"]
        for table in FIGURES["TABLES"].values()
        if {"seconds", "cpu_seconds 512"} & set(table["columns"].values())
    }
    workloads = []
    for run in timed:
        made = json.loads((FIGURES["folder_of"](run) / "run.json").read_text(encoding="utf-8")).get(
            "images", {}
        )
        workloads.append(tuple(made.get(name) for name in ("model", "height", "width", "steps")))
    assert len(workloads) == len(set(workloads)) >= 3


def test_the_plot_shows_the_results() -> None:
    with Image.open(FIGURES["PLOT"]) as image:
        shown = json.loads(image.text["Description"])
    drawn = json.loads(json.dumps(FIGURES["points"]()))
    assert shown == drawn, "run `python docs/figures.py`"
    assert len(drawn["methods"]) <= 4


def test_how_many_images_show_a_loss() -> None:
    """Of 32 a ratio whose interval ends at 1 is just seen, and half as wide a one would be of a quarter."""
    kinds = FIGURES["KINDS"]
    just = {"to reference image": {"value": 2.0, "low": 1.0, "high": 4.0}}
    assert kinds["shown-perceptual"](just, {}) == "32"
    narrow = {"to reference image": {"value": 2.0, "low": 2.0**0.5, "high": 2.0**1.5}}
    assert kinds["shown-perceptual"](narrow, {}) == "8"
    assert kinds["shown-kid"]({"kid": {"value": 2.0, "low": -2.0, "high": 6.0}}, {}) == "128"
    assert kinds["shown-kid"]({"kid": {"value": -0.1, "low": -2.0, "high": 2.0}}, {}) == "-"


@pytest.mark.parametrize("page", PAGES)
def test_every_other_figure_names_what_it_can_be_read_from(page: str) -> None:
    """In its paragraph or the one before."""
    text = FIGURES["unmarked"]((ROOT / page).read_text(encoding="utf-8"))
    paragraphs = re.split(r"\n\s*\n", re.sub(r"```.*?```", "", text, flags=re.S))
    bare = [
        paragraph
        for before, paragraph in zip(["", *paragraphs], paragraphs, strict=False)
        if OURS.search(paragraph) and not SOURCE.search(before + paragraph)
    ]
    assert not bare


def test_it_is_read_in_a_minute() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 110
    words = re.sub(r"^\|.*$", "", re.sub(r"```.*?```|<!--.*?-->", "", text, flags=re.S), flags=re.M).split()
    assert 300 < len(words) <= 500  # tables are looked at


@pytest.mark.parametrize("page", [*PAGES, "CONTRIBUTING.md"])
def test_links_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link]
    missing = [link for link in links if link and not ((ROOT / page).parent / link).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES)
def test_images_are_light_and_say_what_they_show(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    images = re.findall(r"!\[([^\]]*)\]\(([^)]+)\)", text)
    assert not [link for alt, link in images if len(alt) < 20]
    assert sum(((ROOT / page).parent / link).stat().st_size for _, link in images) < 1_000_000
