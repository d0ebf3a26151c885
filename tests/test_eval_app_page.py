"""`demo/app.py` in a real browser, at the widths of a desktop and of a phone."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from browsing import drag, opened
from diffusers import EDMEulerScheduler

pytestmark = pytest.mark.slow

APP = Path(__file__).parents[1] / "demo/app.py"


@pytest.fixture(scope="module")
def address(model_folder):
    """Where the page is, served by the command."""
    words = [sys.executable, "-u", str(APP), "--model", model_folder, "--steps", "10"]
    server = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    line = next(line for line in server.stdout if "http" in line)
    yield line.split()[-1]
    server.terminate()
    server.wait(30)


@pytest.fixture
def page(browser, screen, address):
    """The page as it opens, with a prompt."""
    allowed = ["clipboard-read", "clipboard-write"]
    with opened(browser, address, viewport=screen, permissions=allowed) as page:
        button = page.get_by_role("button", name="Make the images")
        button.wait_for()
        box = button.bounding_box()
        assert box["y"] + box["height"] <= screen["height"]  # it is seen at first
        page.get_by_role("button", name="Sampling").click()
        page.get_by_label("prompt").fill("a cat")
        yield page


def make(page):
    """Press the button; returns what each call was, other text than was there."""
    page.evaluate("document.querySelectorAll('code.calls').forEach(old => old.className = 'old')")
    page.get_by_role("button", name="Make the images").click()
    calls = page.locator("code.calls")
    calls.wait_for(timeout=60_000)
    return str(calls.inner_text())


def test_both_images_are_made_and_compared_under_a_slider(page):
    assert make(page) == "FFFfFffFff (10 calls: 5 full; 5 cached; 3 corrected)"
    row = r"\s+\d+\.\d\d s\s+"
    # On a busy machine, fast may take as long as all plain steps, whose image is the baseline's.
    near = r"(\d+.* dB PSNR|the same image)"
    told = rf"baseline{row}fast{row}\d\.\d\dx as fast in CPU time\s+\d+.*(\d+) plain steps{row}{near}"
    assert re.search(told, page.inner_text("body"), re.DOTALL)
    baseline, own, again, _ = page.locator("img[src*='/file=']").all()
    bodies = [page.request.get(one.get_attribute("src")).body() for one in (baseline, own, again)]
    assert bodies[0] == bodies[2] != bodies[1]
    page.get_by_text("plain steps, which take about as long").wait_for()
    clip = "[...document.querySelectorAll('img')].map(i => getComputedStyle(i).clipPath).join()"
    before = page.evaluate(clip)
    own.scroll_into_view_if_needed()
    drag(page, own.bounding_box(), 0.5, 0.2)
    assert page.evaluate(clip) != before


def test_what_is_wrong_is_said_in_the_page_with_the_way_out(page):
    button, alert = page.get_by_role("button", name="Make the images"), page.locator(".note")
    page.get_by_label("steps", exact=True).fill("0")
    button.click()
    alert.get_by_text("steps = 0: pass 1 or more").wait_for()
    page.get_by_label("steps", exact=True).fill("4")
    make(page)
    alert.get_by_text("a run of 4 steps has none to spare").wait_for()
    page.get_by_label("prompt").fill(" ")
    button.click()
    alert.get_by_text("write what the image is to show").wait_for()
    page.get_by_label("prompt").fill("a cat")
    page.get_by_label("agentsd", exact=True).click()
    make(page)
    assert alert.count() == 0


def test_the_page_refuses_a_model_with_noise_levels_of_its_own(make_pipeline, tmp_path):
    """Before anything is served."""
    make_pipeline(scheduler=EDMEulerScheduler()).save_pretrained(tmp_path)
    words = [sys.executable, str(APP), "--model", str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "use --scheduler model" in done.stderr
