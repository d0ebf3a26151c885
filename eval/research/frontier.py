"""Every method of several tables in one plot and one table, with the fewer steps of each sampler."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from .. import run_file
from ..environment import describe_run
from ..errors import EvalError
from ..files import check_writable, write_bytes
from ..pages import rows as results
from ..pages.quality_table import gain, interval
from ..pages.rows import Column, Row, figure
from .frontier_plot import draw_frontier
from .settings import FrontierSettings

_ALIKE = ("model", "weights", "dtype", "height", "width", "guidance_scale", "steps")
COLUMNS = [
    Column("method", lambda row: row["label"]),
    Column("sampler", figure("sampler", "")),
    Column("images", figure("images", "d")),
    Column("cost", figure("cost_macs", ".2f")),
    Column("time", figure("cost_seconds", ".2f")),
    Column("perceptual distance", interval("reference_distance")),
    Column("gain, by MACs", gain("gain_macs")),
    Column("gain, by time", gain("gain_seconds")),
]
NOTE = (
    "Cost and time are an image's, those of baseline's run of all steps in the same table being 1. The "
    "distance is to the image that the sampler converges to, with a 95% interval. Gain is what fewer "
    "steps of the same sampler cost at that distance, over the method's own cost: below 1, take fewer "
    "steps. Tables are of different days."
)


def command(settings: FrontierSettings, console: Console) -> None:
    """Draw the plot, and write the table that it is of."""
    rows = joined(settings.runs, settings.methods)
    check_writable(settings.out / "frontier.png")
    run = describe_run(settings, torch.device("cpu"))
    results.write_rows(settings.out, "frontier", rows, [COLUMNS], run, NOTE)
    write_bytes(settings.out / "frontier.png", draw_frontier(rows, settings.title))
    console.print(results.to_terminal("frontier", rows, COLUMNS))
    console.print(NOTE)
    console.print(f"figures: {settings.out}", soft_wrap=True)


def joined(folders: Sequence[Path], methods: Sequence[str]) -> list[Row]:
    """Return the rows of several tables; where two have a method under the same sampler, the first one's.

    Args:
        folders: of runs with a table each.
        methods: labels of rows; without any, all of them. The baseline's rows always stand.

    Raises:
        EvalError: a folder holds no table, they are of different models or sizes, or a method is in none.
    """
    found: dict[tuple[str, str], Row] = {}
    before: dict[str, Any] = {}
    for folder in folders:
        run, rows = _read(folder)
        alike = {name: run["images"].get(name) for name in _ALIKE}
        if before and (differs := [name for name in _ALIKE if alike[name] != before[name]]):
            name = differs[0]
            raise EvalError(
                f"{folder} has {name} {alike[name]}, {folders[0]} {before[name]}: draw them apart"
            )
        before = alike
        sampler = run["images"]["scheduler"]
        for row in _placed(rows, sampler, run["images"]["steps"], folder):
            if not methods or row["plain"] or row["label"] in methods:
                found.setdefault((sampler, row["label"]), row)
    labels = {label for _, label in found}
    if missing := [name for name in methods if name not in labels]:
        raise EvalError(f"no run has a row {missing[0]!r}; they have {', '.join(sorted(labels))}")
    return sorted(found.values(), key=lambda row: (row["sampler"], -row["cost_macs"]))


def _read(folder: Path) -> tuple[Row, list[Row]]:
    """Return a run's file, and the rows of its table that were compared with reference images."""
    run = run_file.read(folder)
    try:
        text = (folder / "table.jsonl").read_text(encoding="utf-8")
    except OSError:
        raise EvalError(f"{folder} holds no table; run agentsd-eval table --out {folder}") from None
    rows = [json.loads(line) for line in text.splitlines()]
    rows = [
        row for row in rows if row.get("reference_distance") and row.get("macs") and not row.get("sampler")
    ]
    if not any(row["method"] == "baseline" for row in rows):
        raise EvalError(f"{folder}: its table has no distance of the baseline; give it --reference-steps")
    return run, rows


def _placed(rows: Sequence[Row], sampler: str, steps: int, folder: Path) -> list[Row]:
    """Return what is shown of a table's rows."""
    baseline = next(row["macs"] for row in rows if row["method"] == "baseline")
    shown = []
    for row in rows:
        label, (name, _, own_steps) = row.get("label") or row["method"], row["method"].partition("@")
        gain = {key: value for key, value in row.items() if key.startswith("gain_")}
        shown.append(
            {
                "label": label,
                "sampler": sampler,
                "plain": name == "baseline",
                "steps": int(own_steps or steps),
                "images": row["images"],
                "cost_macs": row["macs"] / baseline,
                "cost_seconds": 1 / row["speedup"] if row.get("speedup") else None,
                **{
                    key: row[key]
                    for key in ("reference_distance", "reference_distance_low", "reference_distance_high")
                },
                **gain,
                "run": folder.name,
            }
        )
    return shown
