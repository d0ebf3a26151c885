"""Cost alone, case by case."""

from rich.console import Console

from agentsd.progress import progress

from ..cost.latency import cases_of, load, measure, methods_of
from ..environment import describe_environment, describe_run
from ..files import check_writable
from ..images.methods import check_schedulers
from ..pages import rows as results
from ..pages.cost_table import tables_of
from ..pages.rows import Row
from ..settings import LatencySettings


def command(settings: LatencySettings, console: Console) -> None:
    """Measure, and after each row write what is known; print the table at the end."""
    methods = methods_of(settings)
    check_writable(settings.out / "latency.jsonl")
    pipe = load(settings)
    check_schedulers(methods, pipe.scheduler, settings.steps)
    cases = cases_of(settings, pipe)
    run = describe_run(settings, describe_environment(pipe.unet.device))
    rows: list[Row] = []
    with progress(console) as bars:
        task = bars.add_task("rounds", total=len(cases) * (settings.repeats + 1))
        for row in measure(pipe, cases, methods, settings, lambda: bars.advance(task)):
            rows.append(row)
            results.write_rows(settings.out, "latency", rows, tables_of(rows, run["clock"]), run)
    compiled = ", compiled" if settings.compile else ""
    title = f"{settings.arch or settings.model}, {settings.steps} steps ({settings.scheduler}){compiled}"
    (columns,) = tables_of(rows, run["clock"]).values()
    results.show(console, rows, {title: columns}, "", settings.out)
