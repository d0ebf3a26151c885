"""One self-contained HTML page of a run: what it gains and loses, tables, plots, images side by side."""

import base64
import csv
import io
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup
from matplotlib.figure import Figure
from PIL import Image
from rich.console import Console

from .. import run_file
from ..errors import EvalError
from ..files import write_bytes
from ..settings import ReportSettings
from . import cost_table, quality_table
from .plots import id_of, plot_of
from .rows import Column, Row, cells, distance_name, is_baseline, method_text

_SIDE = 512  # pixels on a side of an image in the page, at most
_RESULTS = {
    "table": "Methods (Table 10)",
    "check": "The recipes on this model",
    "latency": "Cost alone",
}
_DAMAGED = (ArithmeticError, AttributeError, LookupError, OSError, StopIteration, TypeError, ValueError)
"""What files that were cut or edited make the reading of them raise."""


def command(settings: ReportSettings, console: Console) -> None:
    """Write the page and print where it is."""
    console.print(f"page: {write_report(settings.folder, settings.images)}", soft_wrap=True)


def write_report(folder: Path, images: int) -> Path:
    """Write `folder`/report.html from what the other commands left there; return its path.

    `images` is the number of seeds shown. Raises EvalError if the folder holds no results.
    """
    runs = run_file.read(folder).get("results", {})
    parts = [_whole_part(folder, name, images, runs[name]) for name in _RESULTS if name in runs]
    if not parts:
        raise EvalError(f"{folder} holds no results; run agentsd-eval table --out {folder}")
    loader = jinja2.FileSystemLoader(Path(__file__).parent / "templates")
    environment = jinja2.Environment(loader=loader, autoescape=True)
    environment.filters["id"] = id_of
    path = folder / "report.html"
    model = "the toy model" if parts[0]["model"] == "demo" else parts[0]["model"]
    page = environment.get_template("report.html.j2").render(model=model, parts=parts)
    write_bytes(path, page.encode())
    return path


def _whole_part(folder: Path, name: str, images: int, run: Row) -> dict[str, Any]:
    """Return what `_part` does; raise EvalError where a file of the results is damaged or gone."""
    try:
        return _part(folder, name, images, run)
    except _DAMAGED as error:
        told = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise EvalError(
            f"the results of {name} in {folder} can't be read ({told}); make them again by its command"
        ) from error


def _part(folder: Path, name: str, images: int, run: Row) -> dict[str, Any]:
    """Return what the page says of one results file."""
    lines = (folder / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    rows, settings = [json.loads(line) for line in lines], run["settings"]
    part: dict[str, Any] = {
        "title": _RESULTS[name],
        "model": settings.get("arch") or settings.get("model") or "several tables",
        "command": run["command"],
        "facts": _facts(run),
    }
    if name == "latency":
        tables = cost_table.tables_of(rows, run["clock"])
        part["labels"] = list(dict.fromkeys(map(method_text, rows)))
    else:
        tables = quality_table.tables_of(rows, settings, run["clock"])
        distance = distance_name(settings["features"], settings["model"] == "demo")
        part |= {
            "headline": quality_table.verdict(rows),
            "notes": [quality_table.note(settings["features"]), quality_table.disturbed(rows)],
            "plot": _svg(plot_of(rows, "", distance)),
            "labels": [quality_table.row_label(row) for row in rows],
            "best": quality_table.row_label(best) if (best := _best(rows)) else None,
            "grid": _grid(folder, name, rows, images),
        }
    return part | {"tables": [_table(title, rows, columns) for title, columns in tables.items()]}


def _table(title: str, rows: Sequence[Row], columns: Sequence[Column]) -> dict[str, Any]:
    shown = [
        {"of": quality_table.row_label(row), "cells": line} for row in rows for line in cells([row], columns)
    ]
    return {"title": title, "heads": [column.title for column in columns], "rows": shown}


def _best(rows: Sequence[Row]) -> Row | None:
    """Return the row of the highest gain; where none has a gain, the fastest."""
    own = [row for row in rows if not is_baseline(row) and "@" not in row["method"]]
    for key in ("gain_best_macs", "gain_macs", "speedup"):
        if told := [row for row in own if row.get(key) is not None]:
            return max(told, key=lambda row: row[key])
    return None


def _svg(figure: Figure | None) -> Markup | None:
    if figure is None:
        return None
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None}, transparent=True)
    return Markup(text.getvalue()[text.getvalue().index("<svg") :])


def _facts(run: Row) -> dict[str, str]:
    settings = {key: value for key, value in run["settings"].items() if value not in (None, {}, [])}
    commit = run.get("commit")
    short = re.sub(r"\b([0-9a-f]{12})[0-9a-f]{28}\b", r"\1", commit or "")
    program = f"commit {short}{'' if run['clean'] is True else ', changed since'}" if commit else "a package"
    return {
        "program": program,
        "device": f"{run['device']}, {run['threads']} threads, {run['processes']} processes",
        "versions": ", ".join(f"{name} {version}" for name, version in run["versions"].items()),
        "settings": ", ".join(f"{key} {value}" for key, value in settings.items()),
    }


def _grid(folder: Path, name: str, rows: Sequence[Row], images: int) -> dict[str, Any] | None:
    """Return the methods and, for evenly spread seeds, the prompt and every method's image."""
    methods = [row for row in rows if row.get("key")]
    if outside := [row["key"] for row in methods if Path(row["key"]).name != row["key"]]:
        raise ValueError(f"the key {outside[0]!r} is no folder of images")
    listing = folder / f"{name}-images.csv"
    if not methods or not listing.exists():
        return None
    with listing.open(encoding="utf-8", newline="") as file:
        every = [row for row in csv.DictReader(file) if row["method"] == methods[0]["key"]]
    chosen = every[:: max(1, len(every) // images)][:images]
    lines = []
    for image in chosen:
        file_name = f"{int(image['index']):05d}.png"
        sources = [_data_uri(folder / "images" / method["key"] / file_name) for method in methods]
        if all(sources):
            lines.append({"prompt": image["prompt"], "seed": image["seed"], "sources": sources})
    return (
        {"heads": [quality_table.row_label(method) for method in methods], "lines": lines} if lines else None
    )


def _data_uri(path: Path, side: int = _SIDE) -> str | None:
    if not path.exists():
        return None  # results were kept without their images
    image = Image.open(path).convert("RGB")
    image.thumbnail((side, side), Image.Resampling.LANCZOS)
    content = io.BytesIO()
    image.save(content, format="WEBP", quality=90)
    return "data:image/webp;base64," + base64.b64encode(content.getvalue()).decode()
