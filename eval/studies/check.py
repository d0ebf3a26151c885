"""The recipes on a user's own model, beside the baseline in fewer steps: a page, and results that can be
sent in."""

import json
from pathlib import Path
from typing import Any

from rich.console import Console

from .. import run_file
from ..files import write_bytes
from ..images.store import Store
from ..pages.quality_table import by_time, gain, row_label, verdict
from ..pages.report import write_report
from ..pages.rows import Column, figure, to_terminal
from ..settings import CheckSettings
from . import table

FORMAT = 2
"""Of the file of results."""
SHOWN = 8
"""Seeds whose images are on the page."""
_PATHS = ("model", "prompts", "classes", "reference", "clip")


def command(settings: CheckSettings, console: Console) -> None:
    """Say which rows gain, then print their figures; all tables are on the page."""
    rows = table.run(settings, table.table_methods(settings), "check", console)
    if not rows:
        return
    console.print(verdict(rows), markup=False)
    clock = run_file.read(settings.out)["results"]["check"]["clock"]
    to = "reference" if settings.reference_steps else "baseline"
    columns = [
        Column("method", row_label),
        Column("distance", figure(f"{to}_distance", ".4f")),
        Column("speed-up", figure("speedup", ".2f")),
        Column("gain by time", gain(by_time(rows))),
    ]
    console.print(to_terminal("", rows, columns))
    console.print(
        f"distance: perceptual, to the {to} image of the same seed. speed-up: over baseline ({clock} time). "
        "gain: what plain sampling takes to come as near, over the row's own time (95%)."
    )
    if mixed := Store(settings.out).mixture(rows):
        console.print(mixed, markup=False)
    path = settings.out / "check.json"
    text = json.dumps(results(settings.out), indent=1, ensure_ascii=False)
    write_bytes(path, text.encode())
    console.print(f"page: {write_report(settings.out, SHOWN)}", soft_wrap=True)
    console.print(f"results, without images, prompts and paths: {path}", soft_wrap=True)


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
