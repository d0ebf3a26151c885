"""Pages in a real browser."""

from contextlib import contextmanager


@contextmanager
def opened(browser, address, **settings):
    """A page that asks for nothing of another place, has no error in it, and is no wider than the screen."""
    context = browser.new_context(**settings)
    page, asked, broken = context.new_page(), [], []
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: broken.append(str(error)))
    page.goto(address)
    yield page
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert not [url for url in asked if not url.startswith((address, "data:", "blob:"))]
    assert not broken
    context.close()


def drag(page, box, start, end):
    """Move the mouse along a box's middle with its button down, between shares of the width."""
    middle = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + box["width"] * start, middle)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * end, middle, steps=5)
    page.mouse.up()
