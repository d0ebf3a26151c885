"""Draw images of several methods and prompts into one labelled PNG."""

import textwrap
from collections.abc import Sequence
from math import ceil

from PIL import Image, ImageChops, ImageDraw, ImageFont, ImageOps

_GAP = 8
_FONT_SIZE = 15
_INK = (30, 30, 30)
STRONGER = 4
"""How many times as strong a difference is drawn."""


def draw_grid(
    rows: Sequence[Sequence[Image.Image]],
    row_labels: Sequence[str],
    column_labels: Sequence[str],
    tile: int = 160,
) -> Image.Image:
    """Return an RGB image: one row for each method, one column for each prompt, labels outside.

    Images are brought to `tile` pixels on the longer side; labels may hold line breaks.
    """
    font = ImageFont.load_default(_FONT_SIZE)
    heads = [_wrap(label, tile) for label in column_labels]
    probe = ImageDraw.Draw(Image.new("RGB", (1, 1)))
    top = 2 * _GAP + ceil(max(probe.multiline_textbbox((0, 0), head, font)[3] for head in heads))
    left = 2 * _GAP + ceil(max(probe.multiline_textbbox((0, 0), label, font)[2] for label in row_labels))
    step = tile + _GAP
    grid = Image.new("RGB", (left + len(heads) * step, top + len(rows) * step), "white")
    draw = ImageDraw.Draw(grid)
    for j, head in enumerate(heads):
        draw.multiline_text((left + j * step, _GAP // 2), head, _INK, font)
    for i, images in enumerate(rows):
        y = top + i * step
        draw.multiline_text((_GAP, y + tile // 2), row_labels[i], _INK, font, anchor="lm")
        for j, image in enumerate(images):
            small = ImageOps.contain(image, (tile, tile), Image.Resampling.BICUBIC)
            grid.paste(small, (left + j * step, y))
    return grid


def difference(image: Image.Image, baseline: Image.Image) -> Image.Image:
    """Return where an image differs from the baseline's: white where not, `STRONGER` times as dark where."""
    return ImageChops.difference(image, baseline).point(lambda value: max(0, 255 - STRONGER * value))


def _wrap(label: str, tile: int) -> str:
    characters = max(8, int(tile / (_FONT_SIZE * 0.52)))
    return "\n".join(textwrap.fill(part, characters) for part in label.split("\n"))
