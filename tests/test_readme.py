"""README's and the docs' figures are those of the committed results, and links lead somewhere."""

from __future__ import annotations

import re
import runpy
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FIGURES = runpy.run_path(str(ROOT / "docs/figures.py"))
PAGES = [str(page.relative_to(ROOT)) for page in FIGURES["PAGES"]]
OURS = re.compile(r"\d\.\d+x|\d \([\d.]+-[\d.]+\)|\d+(\.\d+)? dB")
"""A ratio, an interval, a likeness."""
SOURCE = re.compile(r"\]\([^)]*(eval/results|speed\.md|table\.md)[^)]*\)")


@pytest.mark.parametrize("page", PAGES)
def test_figures_are_those_of_the_results(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert FIGURES["written"](text) == text, "run `python docs/figures.py`"


def test_a_figure_that_differs_is_put_right() -> None:
    text = "<!-- figures of gate-demo -->\n<!--=baseline cost-->7<!--=-->, <!--=paper r=0.4 gain-->?<!--=-->"
    first, second = re.findall(r"-->([^<]+)<!--=-->", FIGURES["written"](text))
    assert first == "1.00"
    assert re.fullmatch(r"\d\.\d\d \(\d\.\d\d-\d\.\d\d\)", second)


def test_how_many_pictures_show_a_loss() -> None:
    """Of 32 a ratio whose interval ends at 1 is just seen, and half as wide a one would be of a quarter."""
    kinds = FIGURES["KINDS"]
    just = {"to reference image": {"value": 2.0, "low": 1.0, "high": 4.0}}
    assert kinds["shown-perceptual"](just, {}) == "32"
    narrow = {"to reference image": {"value": 2.0, "low": 2.0**0.5, "high": 2.0**1.5}}
    assert kinds["shown-perceptual"](narrow, {}) == "8"
    assert kinds["shown-kid"]({"kid": {"value": 2.0, "low": -2.0, "high": 6.0}}, {}) == "128"
    assert kinds["shown-kid"]({"kid": {"value": -0.1, "low": -2.0, "high": 2.0}}, {}) == "-"


def test_a_promise_is_kept_where_both_intervals_end_below_the_loss_of_12_steps() -> None:
    rows = {"baseline@12": {"kid_change": 0.006, "fd_change": 1.0}}
    row = {"kid_change": 0.0, "kid_change_error": 0.003, "fd_change": 0.0}
    assert FIGURES["KINDS"]["kept"](row | {"fd_change_error": 0.5}, rows) == "yes"
    assert FIGURES["KINDS"]["kept"](row | {"fd_change_error": 0.52}, rows) == "no"


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


@pytest.mark.parametrize("page", PAGES)
def test_no_line_of_a_paragraph_begins_with_a_comment(page: str) -> None:
    """Markdown takes such a line for HTML, which ends the paragraph."""
    lines = ["", *(ROOT / page).read_text(encoding="utf-8").splitlines()]
    split = [
        line
        for before, line in pairwise(lines)
        if re.match(r"(\s|- )*<!--", line)
        and (not re.fullmatch(r"\s*(<!--.*?-->)+", line) or not re.match(r"$|[#|!]|<!--|\s*```", before))
    ]
    assert not split


def test_it_is_read_in_a_minute() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 100
    words = re.sub(r"```.*?```|<!--.*?-->", "", text, flags=re.S).split()
    assert 400 < len(words) <= 700


@pytest.mark.parametrize(
    "page", ["README.md", "CONTRIBUTING.md", *sorted(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md"))]
)
def test_links_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link]
    missing = [link for link in links if link and not ((ROOT / page).parent / link).exists()]
    assert not missing
