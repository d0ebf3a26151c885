"""Cost alone, case by case."""

from collections.abc import Iterator
from itertools import groupby

from rich.console import Console
from rich.table import Table

from ..cost.latency import cases_of, load, measure, methods_of
from ..environment import describe_run
from ..files import check_writable
from ..pages.cost_table import columns_of
from ..pages.rows import Row, progress, to_terminal, write_rows
from ..settings import LatencySettings


def command(settings: LatencySettings, console: Console) -> None:
    """Measure, and after each case write what is known; print the tables at the end."""
    methods = methods_of(settings)
    check_writable(settings.out / "latency.jsonl")
    pipe = load(settings)
    cases = cases_of(settings, pipe)
    run = describe_run(settings, pipe.unet.device)
    rows = []
    with progress(console) as bars:
        task = bars.add_task("rounds", total=len(cases) * (settings.repeats + 1))
        for row in measure(pipe, cases, methods, settings, lambda: bars.advance(task)):
            rows.append(row)
            write_rows(settings.out, "latency", rows, [columns_of(rows, run["clock"])], run)
    for table in summary(rows, settings, run["clock"]):
        console.print(table)
    console.print(f"figures: {settings.out}", soft_wrap=True)


def summary(rows: list[Row], settings: LatencySettings, clock: str) -> Iterator[Table]:
    """Yield a terminal table for each case."""
    for (scope, size, batch), group in groupby(rows, lambda row: (row["scope"], row["size"], row["batch"])):
        steps = f", {settings.steps} steps ({settings.scheduler})" if scope == "pipeline" else ""
        compiled = ", compiled" if settings.compile else ""
        title = f"{settings.arch or settings.model}, {scope}{steps}, {size} px, batch {batch}{compiled}"
        shown = list(group)
        yield to_terminal(title, shown, columns_of(shown, clock))
