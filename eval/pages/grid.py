"""Draw images of several methods and prompts into one labelled PNG."""

import textwrap
from collections.abc import Sequence

from PIL import Image, ImageDraw, ImageFont

_GAP = 8
_FONT_SIZE = 15
_LINE = 20
_Font = ImageFont.FreeTypeFont | ImageFont.ImageFont
_INK = (30, 30, 30)


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
    columns = [_wrap(label, tile) for label in column_labels]
    lefts = [label.split("\n") for label in row_labels]
    top = _GAP + _LINE * max(len(lines) for lines in columns)
    left = _GAP * 2 + int(max(font.getlength(line) for lines in lefts for line in lines))
    height = top + len(rows) * (tile + _GAP)
    grid = Image.new("RGB", (left + len(column_labels) * (tile + _GAP), height), "white")
    draw = ImageDraw.Draw(grid)
    for j, lines in enumerate(columns):
        _write(draw, font, lines, left + j * (tile + _GAP), _GAP // 2)
    for i, images in enumerate(rows):
        y = top + i * (tile + _GAP)
        _write(draw, font, lefts[i], _GAP, y + tile // 2 - _LINE * len(lefts[i]) // 2)
        for j, image in enumerate(images):
            scale = tile / max(image.size)
            size = (round(image.width * scale), round(image.height * scale))
            grid.paste(image.resize(size, Image.Resampling.BICUBIC), (left + j * (tile + _GAP), y))
    return grid


def _wrap(label: str, tile: int) -> list[str]:
    characters = max(8, int(tile / (_FONT_SIZE * 0.52)))
    return [line for part in label.split("\n") for line in textwrap.wrap(part, characters) or [""]]


def _write(draw: ImageDraw.ImageDraw, font: _Font, lines: list[str], x: int, y: int) -> None:
    for n, line in enumerate(lines):
        draw.text((x, y + n * _LINE), line, fill=_INK, font=font)
