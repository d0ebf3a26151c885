"""What the commands show: progress, tables, plots."""

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

from PIL import Image
from rich.console import Console
from rich.markup import escape as escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from ..files import png_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def progress(console: Console, disable: bool = False) -> Progress:
    """Return a progress bar with the time left."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
        disable=disable,
    )


def make_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Return a terminal table; the first column is text, the others are figures.

    Where the terminal is narrow, cells and heads are wrapped between words, then within them.
    """
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        if number == 0:
            longest = max((len(row[0]) for row in rows), default=0)
            table.add_column(escape(column), overflow="fold", no_wrap=longest <= 18)
        else:
            word = max((len(word) for row in rows for word in row[number].split()), default=0)
            table.add_column(escape(column), justify="right", overflow="fold", min_width=word)
    for row in rows:
        table.add_row(*(escape(cell) for cell in row))
    return table


def plot_bytes(figure: "Figure", dpi: int = 130) -> bytes:
    """Return a plot as PNG in 256 colours: a third of the size."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi)
    return png_bytes(Image.open(buffer).convert("RGB").quantize(256))
