"""The report in a real browser, at the widths of a desktop and of a phone."""

import re
import shutil
from pathlib import Path

import pytest
from agentsd_eval.pages.report import write_report
from agentsd_eval.pages.rows import write_singles
from browsing import drag, opened
from commands import rows_of
from PIL import Image

pytestmark = pytest.mark.slow
RESULTS = Path(__file__).parents[1] / "eval/results/benchmark-demo"


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """That of the committed results, with images of one colour for each method and seed."""
    folder = tmp_path_factory.mktemp("report") / "benchmark-demo"
    shutil.copytree(RESULTS, folder, ignore=shutil.ignore_patterns("features"))
    keys = [row["key"] for row in rows_of(folder / "table.jsonl") if "key" in row]
    singles = [{"method": keys[0], "index": i, "seed": i, "prompt": "an apple"} for i in range(64)]
    write_singles(folder / "table-images.csv", singles)  # committed results come without
    for method, key in enumerate(keys):
        (folder / "images" / key).mkdir(parents=True)
        for index in range(64):
            image = Image.new("RGB", (64, 64), (8 * method, 4 * index, 128))
            image.save(folder / "images" / key / f"{index:05d}.png")
    return write_report(folder, 4)


@pytest.fixture
def page(browser, screen, report):
    with opened(browser, report.as_uri(), viewport=screen, has_touch=screen["width"] < 600) as page:
        yield page


def cut(page):
    return float(page.evaluate("parseFloat(document.querySelector('.pair').style.getPropertyValue('--cut'))"))


def test_the_headline_is_what_gains_in_time(page):
    assert re.match(
        r"\S+ takes \d+% less time than the best plain sampler .*: gain \d\.\d\d \(\d\.\d\d-\d\.\d\d\)\.",
        page.inner_text(".headline"),
    )


def test_the_slider_goes_by_mouse_touch_and_keyboard(page):
    pair = page.locator(".pair")
    pair.scroll_into_view_if_needed()
    box = pair.bounding_box()
    left, right = (page.locator(f".pair .{side}").get_attribute("src") for side in ("left", "right"))
    assert left != right
    if page.evaluate("navigator.maxTouchPoints"):
        page.touchscreen.tap(box["x"] + box["width"] * 0.25, box["y"] + box["height"] / 2)
    else:
        drag(page, box, 0.5, 0.25)
    assert cut(page) == pytest.approx(25, abs=2)
    page.locator(".cut").focus()
    before = cut(page)
    page.keyboard.press("ArrowRight")
    assert cut(page) == before + 1


def test_an_image_that_is_chosen_is_seen_larger(page):
    image = page.locator(".grid tbody tr").nth(2).locator("img").nth(3)
    image.click()
    assert page.locator(".pair .right").get_attribute("src") == image.get_attribute("src")
    width = page.locator(".pair").bounding_box()["width"]
    page.locator(".zoom").select_option("4")
    assert page.locator(".pair").bounding_box()["width"] == pytest.approx(4 * width, rel=0.05)


def test_a_table_is_sorted_by_its_figures(page):
    rows = rows_of(RESULTS / "table.jsonl")
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


def test_the_first_column_stays_in_sight(page):
    frame, first = page.locator(".scroll:has(.sorted)").first, page.locator(".sorted td:first-child").first
    before = first.bounding_box()["x"]
    frame.evaluate("frame => frame.scrollLeft = 300")
    assert first.bounding_box()["x"] == before


def test_a_method_that_is_left_out_is_seen_nowhere(page):
    seen = page.locator("[data-row='row-agentsd_20_r_3d_0_2e_4'], g[id^='row-agentsd_20_r_3d_0_2e_4-']")
    before = [one.is_visible() for one in seen.all()]
    assert sum(before) > 6
    page.locator("summary").click()
    box = page.get_by_role("checkbox", name="agentsd r=0.4", exact=True)
    box.uncheck()
    assert not any(one.is_visible() for one in seen.all())
    box.check()
    assert [one.is_visible() for one in seen.all()] == before
