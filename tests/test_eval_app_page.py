"""`agentsd-eval app` in a real browser, at the widths of a desktop and of a phone."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agentsd_eval.errors import EvalError
from agentsd_eval.settings import AppSettings
from diffusers import EDMEulerScheduler

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def address(model_folder: str) -> Iterator[str]:
    """Where the page is, served by the command."""
    words = ["app", "--model", model_folder, "--steps", "10", "--prompt", "a cat"]
    server = subprocess.Popen(
        [sys.executable, "-m", "agentsd_eval.cli", *words], stdout=subprocess.PIPE, text=True
    )
    assert server.stdout is not None
    line = server.stdout.readline()
    yield line.split()[1]
    server.terminate()
    server.wait(30)


@pytest.fixture
def page(browser: Any, screen: dict[str, int], address: str) -> Iterator[Any]:
    """The page as it opens; whatever it asks for is of this machine, and it is no wider than the screen."""
    context = browser.new_context(viewport=screen, permissions=["clipboard-read", "clipboard-write"])
    page, asked, broken = context.new_page(), [], []
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: broken.append(str(error)))
    page.goto(address)
    button = page.get_by_role("button", name="Make the images")
    button.wait_for()
    box = button.bounding_box()
    assert box["y"] + box["height"] <= screen["height"]  # it is seen at first
    for name in ("Sampling", "Recipe"):
        page.get_by_role("button", name=name, exact=False).first.click()
    yield page
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert not [url for url in asked if not url.startswith((address, "data:", "blob:"))]
    assert not broken
    context.close()


def make(page: Any) -> str:
    """Press the button; returns what each call was, other text than was there."""
    page.evaluate("document.querySelectorAll('code.calls').forEach(old => old.className = 'old')")
    page.get_by_role("button", name="Make the images").click()
    calls = page.locator("code.calls")
    calls.wait_for(timeout=60_000)
    return str(calls.inner_text())


def test_both_images_are_made_and_compared_under_a_slider(page: Any) -> None:
    assert make(page) == "FFFfFffFff (10 calls: 5 computed; 5 cached; 3 corrected)"
    row = r"\s+\d+\.\d\d s\s+"
    told = rf"baseline{row}fast{row}\d\.\d\dx as fast in CPU time\s+\d+.*(\d+) plain steps{row}\d+.* dB PSNR"
    assert re.search(told, page.inner_text("body"), re.DOTALL)
    baseline, own, again, plain = page.locator("img[src*='/file=']").all()
    bodies = [page.request.get(one.get_attribute("src")).body() for one in (baseline, own, again, plain)]
    assert bodies[0] == bodies[2]
    assert len(set(bodies)) == 3
    page.get_by_text("plain steps, which take about as long").wait_for()
    page.locator(".note").get_by_text("on this size fast is step caching alone").wait_for()
    clip = "[...document.querySelectorAll('img')].map(i => getComputedStyle(i).clipPath).join()"
    before = page.evaluate(clip)
    own.scroll_into_view_if_needed()
    box = own.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.2, box["y"] + box["height"] / 2, steps=5)
    page.mouse.up()
    assert page.evaluate(clip) != before


def test_a_size_that_is_chosen_is_the_one_that_runs(page: Any) -> None:
    from playwright.sync_api import expect

    page.get_by_label("64 px", exact=True).click()
    for side in ("width", "height"):
        expect(page.get_by_label(side, exact=True)).to_have_value("64")


def settings_that_run(page: Any, label: str, value: str) -> tuple[str, bytes]:
    """What each call was, and the recipe's image, with a setting of one's own."""
    page.get_by_label(label).fill(value)
    calls = make(page)
    own = page.locator("img[src*='/file=']").nth(1)
    return calls.split()[0], page.request.get(own.get_attribute("src")).body()


def test_the_settings_that_are_chosen_are_those_that_run(page: Any) -> None:
    page.get_by_label("fast", exact=True).click()
    page.get_by_text('mode="fast"').wait_for()
    assert settings_that_run(page, "interval (of", "3")[0] == "FFFffFffFf"
    assert settings_that_run(page, "interval (of", "4")[0] == "FFFfffFfFf"
    page.get_by_label("agentsd", exact=True).click()
    page.get_by_text('mode="agentsd"').wait_for()
    assert settings_that_run(page, "ratio (", "0.1")[1] != settings_that_run(page, "ratio (", "0.7")[1]


def test_the_line_of_python_follows_the_recipe_and_is_copied(page: Any) -> None:
    page.get_by_label("fast", exact=True).click()
    page.get_by_text('mode="fast"').wait_for()
    page.get_by_label("interval (of").fill("3")
    page.get_by_text("StepCache(interval=3, warmup_steps=3, late_interval=6)").wait_for()
    page.get_by_role("button", name="Copy").click()
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied.startswith(
        "from agentsd import Downsample, Recipe, ResidualSharing, StepCache, apply_agentsd"
    )
    assert page.get_by_label("interval (of").input_value() == "3"
    assert not page.get_by_label("ratio (").is_visible()
    page.get_by_label("agentsd", exact=True).click()
    page.get_by_text('mode="agentsd"').wait_for()
    assert page.get_by_label("ratio (").input_value() == "0.4"
    assert not page.get_by_label("interval (of").is_visible()


def test_what_is_wrong_is_said_in_the_page_with_the_way_out(page: Any) -> None:
    button, alert = page.get_by_role("button", name="Make the images"), page.locator(".note")
    page.get_by_label("steps", exact=True).fill("0")
    button.click()
    alert.get_by_text("steps = 0: Input should be greater than or equal to 1").wait_for()
    page.get_by_label("steps", exact=True).fill("4")
    make(page)
    alert.get_by_text("a run of 4 steps has none to spare").wait_for()
    page.get_by_label("agentsd", exact=True).click()
    page.get_by_text('mode="agentsd"').wait_for()
    page.get_by_label("ratio (").fill("1.5")
    button.click()
    alert.get_by_text("ratio=1.5: pass a share in [0, 1)").wait_for()
    page.get_by_label("prompt").fill(" ")
    page.get_by_label("ratio (").fill("0.5")
    button.click()
    alert.get_by_text("write what the image is to show").wait_for()
    page.get_by_label("prompt").fill("a cat")
    make(page)
    assert alert.count() == 0


def test_a_port_that_is_taken_is_said_at_once(address: str) -> None:
    port = address.rstrip("/").rpartition(":")[2]
    words = [sys.executable, "-m", "agentsd_eval.cli", "app"]
    for more, said in (
        (["--port", port], f"error: host '127.0.0.1', port {port}: Address already in use"),
        (["--host", "nowhere.invalid"], "error: host 'nowhere.invalid', port None: "),
    ):
        done = subprocess.run([*words, *more], capture_output=True, text=True, check=False)
        assert done.returncode == 2
        said_last = done.stderr.splitlines()[-1]  # bitsandbytes prints before it, where it is installed
        assert said_last.startswith(said)
        assert "pass another --port" in said_last


def test_the_page_refuses_a_model_with_noise_levels_of_its_own(make_pipeline: Any, tmp_path: Path) -> None:
    """Unless its own sampler is kept."""
    from agentsd_eval.studies.app import Pairs  # needs gradio

    make_pipeline(scheduler=EDMEulerScheduler()).save_pretrained(tmp_path)
    with pytest.raises(EvalError, match="use --scheduler model"):
        Pairs(AppSettings(model=str(tmp_path)))
    Pairs(AppSettings(model=str(tmp_path), scheduler="model"))
