"""Rows of figures on disk and on screen: JSON lines, CSV, Markdown, a terminal table."""

import csv
import io
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .. import run_file
from ..files import write_bytes

Row = dict[str, Any]


@dataclass(frozen=True)
class Column:
    """A column of a table: its title and how a row's figure is written."""

    title: str
    text: Callable[[Row], str]


def figure(key: str, form: str, missing: str = "-") -> Callable[[Row], str]:
    """Return a column's text: the row's `key` in a format such as ".2f"; `missing` where it is None."""

    def text(row: Row) -> str:
        value = row.get(key)
        if value is None:
            return missing
        return value if isinstance(value, str) else format(value, form)

    return text


def giga(key: str) -> Callable[[Row], str]:
    """Return a column's text: the row's `key` in billions."""
    return lambda row: "-" if row.get(key) is None else f"{row[key] / 1e9:.1f}"


def is_baseline(row: Row) -> bool:
    """Whether a row is of the baseline, in however many steps, under whichever sampler."""
    return re.split("[@/]", row["method"])[0] == "baseline"


def method_text(row: Row) -> str:
    """Return the method and ratio of a row for people, such as "agentsd r=0.4"."""
    return row["method"] if row["ratio"] is None else f"{row['method']} r={row['ratio']:g}"


def distance_name(features: str | None, scenes: bool = True) -> str:
    """Return what the FD on a feature network is called; only Inception's is FID.

    `scenes` says that images are the toy model's, whose FD is of the directions in which scenes vary.
    """
    return "FID" if features == "inception" else f"FD ({features}{', 48 components' * scenes})"


def write_rows(
    folder: Path,
    name: str,
    rows: Sequence[Row],
    tables: Mapping[str, Sequence[Column]],
    run: Row,
    note: str = "",
) -> None:
    """Write `name`.jsonl, `name`.csv and `name`.md, and `run` to run.json; each is whole or not there.

    `tables` are the columns of each table by its title, and `note` what stands below them.
    """
    run_file.update(folder, results={name: run})
    lines = [json.dumps(_json_values(row), ensure_ascii=False) for row in rows]
    write_bytes(folder / f"{name}.jsonl", ("\n".join(lines) + "\n").encode())
    write_csv(folder / f"{name}.csv", rows)
    parts = [to_markdown(rows, columns) for columns in tables.values()]
    parts += [f"{note}\n"] if note else []
    parts.append(f"`{run['command']}`\n")
    write_bytes(folder / f"{name}.md", "\n".join(parts).encode())


def _json_values(row: Row) -> Row:
    """Return the row with "inf" for infinity (the PSNR of equal images), which JSON doesn't have."""
    return {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """Write rows as CSV, with every key of theirs as a column."""
    text, keys = io.StringIO(), list(dict.fromkeys(key for row in rows for key in row))
    writer = csv.DictWriter(text, keys, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_bytes(path, text.getvalue().encode())


def write_singles(path: Path, rows: Sequence[Row]) -> None:
    """Write the figures of single images as CSV, to six digits: a long table's file is large."""
    short = [{k: float(f"{v:.6g}") if isinstance(v, float) else v for k, v in row.items()} for row in rows]
    write_csv(path, short)


def filled(rows: Sequence[Row], columns: Sequence[Column]) -> list[Column]:
    """Return the columns in which a row has a figure."""
    return [column for column in columns if any(column.text(row) != "-" for row in rows)]


def cells(rows: Sequence[Row], columns: Sequence[Column]) -> list[list[str]]:
    """Return the text of each cell; rows without a figure are left out."""
    lines = [[column.text(row) for column in columns] for row in rows]
    return [line for line in lines if any(cell not in ("-", "n/a") for cell in line[1:])]


def to_markdown(rows: Sequence[Row], columns: Sequence[Column]) -> str:
    """Return a table that can be pasted in a README."""
    lines = [[_escaped(column.title) for column in columns], ["---"] + ["---:"] * (len(columns) - 1)]
    lines += [[_escaped(cell) for cell in line] for line in cells(rows, columns)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _escaped(cell: str) -> str:
    """Return a cell as Markdown and HTML show it, whatever a method is called."""
    return " ".join(cell.split()).replace("<", "&lt;").replace("|", "\\|")


def to_terminal(title: str, rows: Sequence[Row], columns: Sequence[Column]) -> Table:
    """Return a terminal table; the first column is text, the others are figures.

    Where the terminal is narrow, cells and heads are wrapped between words, then within them.
    """
    lines = cells(rows, columns)
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        texts = [line[number] for line in lines]
        if number == 0:
            short = max(map(len, texts), default=0) <= 18
            table.add_column(escape(column.title), overflow="fold", no_wrap=short)
        else:
            word = max((len(word) for text in texts for word in text.split()), default=0)
            table.add_column(escape(column.title), justify="right", overflow="fold", min_width=word)
    for line in lines:
        table.add_row(*map(escape, line))
    return table


def show(
    console: Console, rows: Sequence[Row], tables: Mapping[str, Sequence[Column]], note: str, folder: Path
) -> None:
    """Print a run's tables, what stands below them, and where its files are."""
    for title, columns in tables.items():
        console.print(to_terminal(title, rows, columns))
    if note:
        console.print(note)
    console.print(f"figures: {folder}", soft_wrap=True)
