"""The report in a real browser, at the widths of a desktop and of a phone."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agentsd_eval.pages.report import write_report
from agentsd_eval.pages.rows import write_singles
from PIL import Image

pytestmark = pytest.mark.slow
RESULTS = Path(__file__).parents[1] / "eval/results/benchmark-64-demo"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """That of the committed results, with images of one colour for each method and seed."""
    folder = tmp_path_factory.mktemp("report") / "benchmark-64-demo"
    shutil.copytree(RESULTS, folder, ignore=shutil.ignore_patterns("features"))
    rows = map(json.loads, (folder / "table.jsonl").read_text(encoding="utf-8").splitlines())
    keys = [row["key"] for row in rows if "key" in row]
    singles = [{"method": keys[0], "index": i, "seed": i, "prompt": "an apple"} for i in range(64)]
    write_singles(folder / "table-images.csv", singles)  # committed results come without
    for method, key in enumerate(keys):
        (folder / "images" / key).mkdir(parents=True)
        for index in range(64):
            image = Image.new("RGB", (64, 64), (8 * method, 4 * index, 128))
            image.save(folder / "images" / key / f"{index:05d}.png")
    return write_report(folder, 4)


@pytest.fixture
def page(browser: Any, screen: dict[str, int], report: Path) -> Iterator[Any]:
    """The page as it opens; it asks for nothing else, and is no wider than the screen."""
    context = browser.new_context(viewport=screen, has_touch=screen["width"] < 600)
    page, asked, broken = context.new_page(), [], []
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: broken.append(str(error)))
    page.goto(report.as_uri())
    yield page
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert not [url for url in asked if not url.startswith(("file:", "data:"))]
    assert not broken
    context.close()


def cut(page: Any) -> float:
    return float(page.evaluate("parseFloat(document.querySelector('.pair').style.getPropertyValue('--cut'))"))


def test_the_headline_is_what_gains_in_time(page: Any) -> None:
    assert re.match(
        r"\S+ takes \d+% less time than the best plain sampler .*: gain \d\.\d\d \(\d\.\d\d-\d\.\d\d\)\.",
        page.inner_text(".headline"),
    )


def test_the_slider_goes_by_mouse_touch_and_keyboard(page: Any) -> None:
    pair = page.locator(".pair")
    pair.scroll_into_view_if_needed()
    box = pair.bounding_box()
    assert page.locator(".pair .left").get_attribute("src") != page.locator(".pair .right").get_attribute(
        "src"
    )
    if page.evaluate("navigator.maxTouchPoints"):
        page.touchscreen.tap(box["x"] + box["width"] * 0.25, box["y"] + box["height"] / 2)
    else:
        page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + box["height"] / 2)
        page.mouse.down()
        page.mouse.move(box["x"] + box["width"] * 0.25, box["y"] + box["height"] / 2, steps=3)
        page.mouse.up()
    assert cut(page) == pytest.approx(25, abs=2)
    page.locator(".cut").focus()
    before = cut(page)
    page.keyboard.press("ArrowRight")
    assert cut(page) == before + 1


def test_an_image_that_is_chosen_is_seen_larger(page: Any) -> None:
    image = page.locator(".grid tbody tr").nth(2).locator("img").nth(3)
    image.click()
    assert page.locator(".pair .right").get_attribute("src") == image.get_attribute("src")
    width = page.locator(".pair").bounding_box()["width"]
    page.locator(".zoom").select_option("4")
    assert page.locator(".pair").bounding_box()["width"] == pytest.approx(4 * width, rel=0.05)


def test_a_table_is_sorted_by_its_figures(page: Any) -> None:
    rows = list(map(json.loads, (RESULTS / "table.jsonl").read_text(encoding="utf-8").splitlines()))
    measured = sorted(row["reference_distance"] for row in rows if row.get("reference_distance"))
    table = page.locator(".sorted").nth(1)  # the first is the paper's
    for order in (reversed(measured), measured):
        table.get_by_role("button", name="to reference image").click()
        cells = table.locator("tbody td:nth-child(3)").all_inner_texts()
        assert cells[-1] == "-"  # what was not measured comes last
        assert [cell.split()[0] for cell in cells[:-1]] == [f"{value:.4f}" for value in order]
    table.get_by_role("button", name="method").click()
    labels = table.locator("tbody td:first-child").all_inner_texts()
    assert labels[0] == max(row["label"] for row in rows if "label" in row)


def test_the_first_column_stays_in_sight(page: Any) -> None:
    frame, first = page.locator(".scroll:has(.sorted)").first, page.locator(".sorted td:first-child").first
    before = first.bounding_box()["x"]
    frame.evaluate("frame => frame.scrollLeft = 300")
    assert first.bounding_box()["x"] == before


def test_a_method_that_is_left_out_is_seen_nowhere(page: Any) -> None:
    seen = page.locator("[data-row='row-agentsd_20_r_3d_0_2e_4'], g[id^='row-agentsd_20_r_3d_0_2e_4-']")
    before = [one.is_visible() for one in seen.all()]
    assert sum(before) > 6
    page.locator("summary").click()
    box = page.get_by_role("checkbox", name="agentsd r=0.4", exact=True)
    box.uncheck()
    assert not any(one.is_visible() for one in seen.all())
    box.check()
    assert [one.is_visible() for one in seen.all()] == before
