"""The recipes on a user's own model, beside the baseline in fewer steps: a page, and results that can be
sent in."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from .. import run_file
from ..files import write_bytes
from ..intervals import enough
from ..pages.plots import is_baseline
from ..pages.quality_table import row_label
from ..pages.report import write_report
from ..pages.rows import Row
from ..settings import CheckSettings
from . import table

FORMAT = 2
"""Of the file of results."""
SHOWN = 8
"""Seeds whose images are on the page."""
_PATHS = ("model", "prompts", "classes", "reference", "clip")


def command(settings: CheckSettings, console: Console) -> None:
    """Make the table, then the page and the file of results, and say which rows gain."""
    rows = table.show(settings, table.table_methods(settings), "check", console)
    if not rows:
        return
    console.print(verdict(rows), markup=False)
    path = settings.out / "check.json"
    text = json.dumps(results(settings.out), indent=1, ensure_ascii=False)
    write_bytes(path, text.encode())
    console.print(f"page: {write_report(settings.out, SHOWN)}", soft_wrap=True)
    console.print(f"results, without images, prompts and paths: {path}", soft_wrap=True)


def verdict(rows: Sequence[Row]) -> str:
    """Return which rows gain by time over the best plain sampler in fewer steps."""
    key = "gain_best_seconds" if any("gain_best_seconds" in row for row in rows) else "gain_seconds"
    rows = [row for row in rows if row.get(key) is not None and not is_baseline(row)]
    if not rows:
        return "No row's gain is known: it takes the baseline in fewer steps, and recipes."
    if not all(map(enough, rows)):
        return "No interval, so nothing is said to gain."
    gain = [row_label(row) for row in rows if (row.get(f"{key}_low") or 0) > 1]
    if gain:
        return f"Better than fewer steps here, by time, beyond the error: {', '.join(gain)}."
    return "Nothing here is better than fewer steps beyond the error: take fewer steps."


def results(folder: Path) -> dict[str, Any]:
    """Return what may be sent in of a run's folder: its environment, its settings without paths, its rows."""
    run = run_file.read(folder)["results"]["check"]
    settings = {
        key: Path(value).name if key in _PATHS and isinstance(value, str) else value
        for key, value in run["settings"].items()
        if key not in ("named", "calibrated")
    }
    environment = {key: value for key, value in run.items() if key not in ("settings", "command")}
    lines = (folder / "check.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return {"format": FORMAT, "environment": environment, "settings": settings, "rows": rows}
