"""README's and docs' figures are those of the committed results; links lead somewhere; pages are small."""

import json
import re
import runpy
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from agentsd_eval import run_file
from PIL import Image

ROOT = Path(__file__).parents[1]
FIGURES = runpy.run_path(str(ROOT / "docs/figures.py"))
PAGES = [str(page.relative_to(ROOT)) for page in FIGURES["PAGES"]]
OURS = re.compile(r"\d\.\d+x|\d \([\d.]+-[\d.]+\)|\d+(\.\d+)? dB")
"""A ratio, an interval, a likeness."""
SOURCE = re.compile(r"\]\([^)]*(eval/results|speed\.md|table\.md)[^)]*\)")


def read(page):
    return (ROOT / page).read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES)
def test_figures_are_those_of_the_results(page):
    assert FIGURES["written"](read(page), ROOT / page) == read(page), "run `python docs/figures.py`"


@pytest.mark.parametrize("page", PAGES)
def test_no_line_of_text_begins_with_a_comment(page):
    """In Markdown such a line is raw HTML: backticks and links in it are shown as they are."""
    assert not re.findall(r"(?m)^<!--.*-->[^\S\n]*\S.*$", read(page))


def test_a_figure_that_differs_is_put_right():
    figures = "<!--=baseline macs-->7<!--=--> <!--=deepcache-2 gain-range-->?<!--=-->"
    text = f"<!-- figures of benchmark -->\n{figures}"
    first, second = re.findall(r"-->([^<]+)<!--=-->", FIGURES["written"](text))
    assert first == "1.00"
    assert re.fullmatch(r"\d\.\d\d \(\d\.\d\d-\d\.\d\d\)", second)


def test_every_row_of_the_tables_is_one_that_some_run_has():
    """A table leaves out what its run lacks, so a name that is mistyped would never be missed."""
    tables = FIGURES["TABLES"].values()
    found = {label for table in tables for label in FIGURES["rows_of"](table["run"])}
    paths = [*(ROOT / "configs").glob("*.yaml"), *(ROOT / "eval/research/presets").glob("*.yaml")]
    configs = [yaml.safe_load(path.read_text(encoding="utf-8")) for path in paths]
    found |= {method for config in configs if config for method in config.get("methods", ())}
    wanted = {label for table in tables for label in table["rows"].values()}
    assert not wanted - found


def test_one_workload_has_one_number_of_seconds():
    """Two machines' seconds of the same images on two pages would look like a contradiction."""
    seconds = {"seconds", "cpu_seconds 512"}
    tables = FIGURES["TABLES"].values()
    workloads = []
    for run in {table["run"] for table in tables if seconds & set(table["columns"].values())}:
        made = run_file.read(FIGURES["folder_of"](run)).get("images", {})
        workloads.append(tuple(made.get(name) for name in ("model", "height", "width", "steps")))
    assert len(workloads) == len(set(workloads)) >= 3


def test_the_plot_shows_the_results():
    with Image.open(FIGURES["PLOT"]) as image:
        shown = json.loads(image.text["Description"])
    drawn = json.loads(json.dumps(FIGURES["points"]()))
    assert shown == drawn, "run `python docs/figures.py`"
    assert len(drawn["methods"]) <= 4


def test_how_many_images_show_a_loss():
    """Of 32 a ratio whose interval ends at 1 is just seen, and half as wide a one would be of a quarter."""
    kinds = FIGURES["KINDS"]
    just = {"to reference image": {"value": 2.0, "low": 1.0, "high": 4.0}}
    assert kinds["shown-perceptual"](just, {}) == "32"
    narrow = {"to reference image": {"value": 2.0, "low": 2.0**0.5, "high": 2.0**1.5}}
    assert kinds["shown-perceptual"](narrow, {}) == "8"
    assert kinds["shown-kid"]({"kid": {"value": 2.0, "low": -2.0, "high": 6.0}}, {}) == "128"
    assert kinds["shown-kid"]({"kid": {"value": -0.1, "low": -2.0, "high": 2.0}}, {}) == "-"


@pytest.mark.parametrize("page", PAGES)
def test_every_other_figure_names_what_it_can_be_read_from(page):
    """In its paragraph or the one before."""
    text = re.sub(r"```.*?```", "", FIGURES["unmarked"](read(page)), flags=re.S)
    for before, paragraph in pairwise(["", *re.split(r"\n\s*\n", text)]):
        assert not OURS.search(paragraph) or SOURCE.search(before + paragraph), paragraph


def test_it_is_read_in_a_minute():
    text = read("README.md")
    assert len(text.splitlines()) <= 110
    words = re.sub(r"^\|.*$", "", re.sub(r"```.*?```|<!--.*?-->", "", text, flags=re.S), flags=re.M).split()
    assert 300 < len(words) <= 500  # tables are looked at


@pytest.mark.parametrize("page", [*PAGES, "CONTRIBUTING.md"])
def test_links_lead_somewhere(page):
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)]+)\)", read(page)) if "://" not in link]
    assert not [link for link in links if link and not ((ROOT / page).parent / link).exists()]


@pytest.mark.parametrize("page", PAGES)
def test_images_are_light_and_say_what_they_show(page):
    images = re.findall(r"!\[([^\]]*)\]\(([^)]+)\)", read(page))
    assert not [link for alt, link in images if len(alt) < 20]
    assert sum(((ROOT / page).parent / link).stat().st_size for _, link in images) < 1_000_000
