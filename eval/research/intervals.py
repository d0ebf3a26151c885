"""A table's distances, gains and intervals, made anew from the figures of its single images alone."""

import csv
import json
import math
from pathlib import Path

from rich.console import Console

from ..errors import EvalError
from ..pages.quality_table import tables_of
from ..pages.rows import Row, show
from ..quality.summary import summary_of
from ..studies.table import add_gain
from .settings import IntervalsSettings

_OF_A_ROW = "method", "ratio", "key", "label", "sampler", "backend", "speedup", "macs", "images", "captions"
_TOLERANCE = 1e-3  # single images' figures have six digits


def command(settings: IntervalsSettings, console: Console) -> None:
    """Print the table, or raise EvalError where the folder's own says something else."""
    folder = settings.folder
    try:
        lines = (folder / "table.jsonl").read_text(encoding="utf-8").splitlines()
        kept = [row for row in map(json.loads, lines) if row.get("key")]
        with (folder / "table-images.csv").open(newline="", encoding="utf-8") as file:
            singles = [_read(line) for line in csv.DictReader(file)]
    except FileNotFoundError as error:
        raise EvalError(f"{error.filename} is missing: pass the folder of a table's results") from None
    rows = made_anew(kept, singles)
    for row, old in zip(rows, kept, strict=True):
        _compare(row, old, folder)
    (title, columns), *_ = list(tables_of(rows, {"features": None, "model": ""}, "").items())[1:]
    show(console, rows, {title: columns}, "", folder)


def made_anew(kept: list[Row], singles: list[Row]) -> list[Row]:
    """Return the rows of a table with the distances and gains of single images; `kept` has their costs."""
    of_row = {row["key"]: [one for one in singles if one["method"] == row["key"]] for row in kept}
    baseline = of_row[kept[0]["key"]]
    rows = []
    for row in kept:
        own = of_row[row["key"]]
        made = summary_of(own, None if own is baseline else baseline)
        rows.append({name: row.get(name) for name in _OF_A_ROW} | made)
    add_gain(rows, singles)
    return rows


def _read(line: dict[str, str]) -> Row:
    """Return a single image's row; what is no number is text, and an empty cell is None."""
    texts = {name: line.pop(name) for name in ("method", "prompt")}
    return texts | {name: float(value) if value else None for name, value in line.items()}


def _compare(row: Row, old: Row, folder: Path) -> None:
    """Raise EvalError for a figure that isn't the folder's."""
    for name in row.keys() - set(_OF_A_ROW):
        ours, theirs = row[name], old.get(name)
        if isinstance(ours, float) and isinstance(theirs, int | float):
            same = math.isclose(ours, float(theirs), rel_tol=_TOLERANCE)
        else:
            same = ours == theirs
        if not same:
            raise EvalError(f"{folder}: {name} of {row['label']} is {ours} by its images and {theirs} there")
