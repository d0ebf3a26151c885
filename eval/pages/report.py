"""One self-contained HTML page of a run: what it gains and loses, tables, plots, images side by side."""

import base64
import csv
import io
import json
from collections.abc import Sequence
from itertools import groupby
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
from . import cost_table, quality_table, subject_table
from .plots import frontier, id_of, is_baseline, is_placed, speeds
from .rows import Column, Row, cells, method_text

_SIDE = 512  # pixels on a side of an image in the page, at most
_RESULTS = {
    "table": "Methods (Table 10)",
    "check": "The recipes on this model",
    "latency": "Cost alone",
    "subject": "A subject taught with agent attention",
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
    rows = _read_jsonl(folder / f"{name}.jsonl")
    part = {
        "title": _RESULTS[name],
        "model": run["settings"].get("arch") or run["settings"].get("model") or "several tables",
        "command": run["command"],
        "facts": _facts(run),
    }
    if name == "latency":
        return part | {
            "headline": _gain(rows, run["clock"]),
            "tables": _latency_tables(rows, run["clock"]),
            "plots": [_speeds(rows, run["clock"])],
            "labels": list(dict.fromkeys(map(method_text, rows))),
        }
    if name == "subject":
        tables = subject_table.tables_of(rows)
        return part | {
            "tables": [_table(title, rows, columns) for title, columns in tables.items()],
            "image": _data_uri(folder / "subject.png", 1600),
        }
    tables = quality_table.tables_of(rows, run["settings"])
    keys = [
        key for key in ("reference_distance", "baseline_distance") if any(is_placed(row, key) for row in rows)
    ]
    return part | {
        "headline": _gain_and_loss(rows, run.get("clock", "CPU")),
        "tables": [_table(title, rows, columns) for title, columns in tables.items()],
        "notes": [quality_table.note(run["settings"]["features"])],
        "plots": [_svg(frontier(rows, key=key)) for key in keys[:1]],
        "labels": [quality_table.row_label(row) for row in rows],
        "best": quality_table.row_label(best) if (best := _best(rows)) else None,
        "grid": _grid(folder, name, rows, images),
    }


def _read_jsonl(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _table(title: str, rows: Sequence[Row], columns: Sequence[Column]) -> dict[str, Any]:
    shown = [{"of": _row_name(row), "cells": line} for row in rows for line in cells([row], columns)]
    return {"title": title, "heads": [column.title for column in columns], "rows": shown}


def _row_name(row: Row) -> str:
    """Return what a row is shown and hidden by."""
    if "variant" in row:
        return subject_table.label_of(row)
    return quality_table.row_label(row) if "label" in row else method_text(row)


def _latency_tables(rows: list[Row], clock: str) -> list[dict[str, Any]]:
    cases = [(case, list(shown)) for case, shown in groupby(rows, _case)]
    return [_table(case, shown, cost_table.columns_of(shown, clock)) for case, shown in cases]


def _case(row: Row) -> str:
    return f"{row['scope']}, {row['size']} px, batch {row['batch']}"


def _best(rows: Sequence[Row]) -> Row | None:
    """Return the row of the highest gain; where none has a gain, the fastest."""
    own = [row for row in rows if not is_baseline(row) and "@" not in row["method"]]
    for key in ("gain_best_macs", "gain_macs", "speedup"):
        if told := [row for row in own if row.get(key) is not None]:
            return max(told, key=lambda row: row[key])
    return None


def _gain_and_loss(rows: Sequence[Row], clock: str) -> str | None:
    """Return what the best method gains and loses."""
    if (row := _best(rows)) is None:
        return None
    told = [f"{quality_table.row_label(row)}:"]
    if row.get("speedup") is not None:
        told.append(f"{row['speedup']:.2f}x as fast as baseline ({clock} time),")
    if row.get("gain_macs") is not None:
        best = row.get("gain_best_macs") is not None
        key, plain = ("gain_best_macs", "the best plain sampler") if best else ("gain_macs", "fewer steps")
        baseline = next(row for row in rows if row["method"] == "baseline")
        distance, gain = quality_table.interval("reference_distance"), quality_table.gain(key)
        told.append(
            f"perceptual distance to the reference image {distance(row)}, "
            f"the baseline's {distance(baseline)};"
        )
        told.append(f"gain over {plain} {gain(row)} by MACs.")
    elif row.get("psnr") is None:
        told.append("its images are the baseline's." if row.get("equal_images") else "no loss was measured.")
    else:
        told.append(f"{row['psnr']:.1f} dB PSNR to it.")
    return " ".join(told)


def _gain(rows: Sequence[Row], clock: str) -> str | None:
    timed = [row for row in rows if row["method"] != "baseline" and row.get("speedup") is not None]
    whole = [row for row in timed if row["scope"] == "pipeline"] or timed
    if not whole:
        return None
    row = max(whole, key=lambda row: row["speedup"])
    interval = f"{row['speedup']:.2f}x ({row['speedup_low']:.2f}-{row['speedup_high']:.2f})"
    gain = f"{method_text(row)}: {interval} as fast as baseline ({clock} time; {_case(row)})."
    return f"{gain} No loss is measured here."


def _speeds(rows: Sequence[Row], clock: str) -> Markup:
    """Return an SVG of each row's speed-up."""
    shown = [row for row in rows if row.get("speedup") is not None]
    several = len({_case(row) for row in shown}) > 1
    labels = []
    for row in shown:
        backend = "" if row["backend"] == "sdpa" else f", {row['backend']}"
        labels.append(f"{method_text(row)}{backend}" + (f", {_case(row)}" if several else ""))
    return _svg(speeds(shown, labels, [id_of(method_text(row)) for row in shown], clock))


def _svg(figure: Figure) -> Markup:
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None}, transparent=True)
    return Markup(text.getvalue()[text.getvalue().index("<svg") :])


def _facts(run: Row) -> dict[str, str]:
    settings = {key: value for key, value in run["settings"].items() if value not in (None, {}, [])}
    commit = run.get("commit")
    program = f"commit {commit[:12]}{'' if run['clean'] else ', changed since'}" if commit else "a package"
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
