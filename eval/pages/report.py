"""One self-contained HTML page of a run: tables, quality against time (Fig. 5), pictures side by side."""

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

from ..errors import EvalError
from ..settings import ReportSettings
from . import cost_table, quality_table, run_file
from .output import write_bytes
from .rows import Column, Row, cells, distance_name

_SIDE = 256  # pixels on a side of a picture in the page, at most
_RESULTS = {
    "table": "Methods (Table 10)",
    "check": "The recipes on this model",
    "ablate-k": "Ablation of k (Table 11)",
    "ablate-scale": "Ablation of the scale (Table 12)",
    "ablate-early": "Ablation of the early steps (Table 13)",
    "latency": "Cost alone",
}
_MARKERS = "osD^vP"


def command(settings: ReportSettings, console: Console) -> None:
    """Write the page and print where it is."""
    console.print(f"page: {write_report(settings.folder, settings.pictures)}", soft_wrap=True)


def write_report(folder: Path, pictures: int) -> Path:
    """Write `folder`/report.html from what `table`, `ablate` and `latency` left there; return its path.

    `pictures` is the number of seeds shown. Raises EvalError if the folder holds no results.
    """
    runs = run_file.read(folder).get("results", {})
    parts = [_part(folder, name, pictures, runs[name]) for name in _RESULTS if name in runs]
    if not parts:
        raise EvalError(f"{folder} holds no results; run agentsd-eval table --out {folder}")
    loader = jinja2.FileSystemLoader(Path(__file__).parent / "templates")
    template = jinja2.Environment(loader=loader, autoescape=True).get_template("report.html.j2")
    path = folder / "report.html"
    write_bytes(path, template.render(model=parts[0]["model"], parts=parts).encode())
    return path


def _part(folder: Path, name: str, pictures: int, run: Row) -> dict[str, Any]:
    """Return what the page says of one results file."""
    rows = _read_jsonl(folder / f"{name}.jsonl")
    part = {
        "title": _RESULTS[name],
        "model": run["settings"].get("arch") or run["settings"]["model"],
        "command": run["command"],
        "facts": _facts(run),
    }
    if name == "latency":
        return part | {"tables": _latency_tables(rows, run["clock"])}
    features = run["settings"]["features"]
    return part | {
        "tables": [
            _table(title, rows, columns) for title, columns in quality_table.tables_of(rows, features).items()
        ],
        "notes": [quality_table.NOTE, quality_table.plan(rows)],
        "scatter": _scatter(rows, features),
        "grid": _grid(folder, name, rows, pictures),
    }


def _read_jsonl(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _table(title: str, rows: Sequence[Row], columns: Sequence[Column]) -> dict[str, Any]:
    return {"title": title, "heads": [column.title for column in columns], "rows": cells(rows, columns)}


def _latency_tables(rows: list[Row], clock: str) -> list[dict[str, Any]]:
    tables = []
    for case, group in groupby(rows, lambda row: (row["scope"], row["size"], row["batch"])):
        shown = list(group)
        scope, size, batch = case
        columns = cost_table.columns_of(shown, clock)
        tables.append(_table(f"{scope}, {size} px, batch {batch}", shown, columns))
    return tables


def _facts(run: Row) -> dict[str, str]:
    settings = {key: value for key, value in run["settings"].items() if value not in (None, {}, [])}
    commit = run.get("commit")
    maker = f"commit {commit[:12]}{'' if run['clean'] else ', changed since'}" if commit else "a package"
    return {
        "program": maker,
        "device": f"{run['device']}, {run['threads']} threads, {run['processes']} processes",
        "versions": ", ".join(f"{name} {version}" for name, version in run["versions"].items()),
        "settings": ", ".join(f"{key} {value}" for key, value in settings.items()),
    }


def _scatter(rows: Sequence[Row], features: str | None) -> Markup | None:
    """Return an SVG of distance against seconds, a line through each method's ratios, or steps."""
    points = [row for row in rows if row.get("frechet") is not None and row.get("seconds") is not None]
    if not points:
        return None
    figure = Figure(figsize=(8.5, 4.2), layout="constrained")
    axes = figure.add_subplot()
    lines = groupby(points, lambda row: row["method"].partition("@")[0])
    for marker, (name, group) in zip(_MARKERS * 9, lines, strict=False):
        line = list(group)
        x, y = [row["seconds"] for row in line], [row["frechet"] for row in line]
        # Values of an ablated setting have no order in time: points without a line.
        style = "none" if any(row.get("agent") for row in line) else "-"
        axes.plot(x, y, marker=marker, markersize=7, linestyle=style, label=name)
        for row in line:
            steps = row["method"].partition("@")[2]
            ratio = f"{steps} steps" if steps else "" if row["ratio"] is None else f"r={row['ratio']:g}"
            text = (row.get("agent") or ratio) if len(line) > 1 else ratio
            axes.annotate(
                text, (row["seconds"], row["frechet"]), (6, 5), textcoords="offset points", fontsize=8
            )
    axes.margins(0.12)
    axes.set_xlabel("seconds per image")
    axes.set_ylabel(distance_name(features))
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper")
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    return Markup(text.getvalue()[text.getvalue().index("<svg") :])


def _grid(folder: Path, name: str, rows: Sequence[Row], pictures: int) -> dict[str, Any] | None:
    """Return the methods and, for evenly spread seeds, the prompt and every method's picture."""
    methods = [row for row in rows if row.get("key")]
    listing = folder / f"{name}-pictures.csv"
    if not methods or not listing.exists():
        return None
    with listing.open(encoding="utf-8", newline="") as file:
        every = [row for row in csv.DictReader(file) if row["method"] == methods[0]["key"]]
    chosen = every[:: max(1, len(every) // pictures)][:pictures]
    lines = []
    for picture in chosen:
        file_name = f"{int(picture['index']):05d}.png"
        sources = [_data_uri(folder / "pictures" / method["key"] / file_name) for method in methods]
        if all(sources):
            lines.append({"prompt": picture["prompt"], "seed": picture["seed"], "sources": sources})
    return (
        {"heads": [quality_table.row_label(method) for method in methods], "lines": lines} if lines else None
    )


def _data_uri(path: Path) -> str | None:
    if not path.exists():
        return None  # results were kept without their pictures
    image = Image.open(path).convert("RGB")
    image.thumbnail((_SIDE, _SIDE), Image.Resampling.LANCZOS)
    content = io.BytesIO()
    image.save(content, format="WEBP", quality=90)
    return "data:image/webp;base64," + base64.b64encode(content.getvalue()).decode()
