"""The commands that measure cost without looking at pictures."""

from pathlib import Path
from typing import Annotated

import typer

from . import options as o
from .command import app, clear_errors, console, given
from .pages import output
from .pages import rows as results
from .settings import LatencySettings, ProfileSettings, load_settings


@app.command()
@clear_errors
def latency(
    config: o.Config = None,
    model: o.Model = None,
    arch: o.Arch = None,
    methods: o.Methods = None,
    ratio: o.Ratio = None,
    sizes: o.Sizes = None,
    batches: o.Batches = None,
    scopes: o.Scopes = None,
    backends: o.Backends = None,
    compile: Annotated[
        bool | None, typer.Option("--compile", help="Compile the U-Net under every method, stock too.")
    ] = None,
    gradient_checkpointing: Annotated[
        bool | None, typer.Option("--gradient-checkpointing", help="In training steps.")
    ] = None,
    repeats: o.Repeats = None,
    out: Annotated[Path | None, typer.Option(help="Folder for latency.jsonl, .csv and .md.")] = None,
    steps: o.Steps = None,
    guidance_scale: o.Guidance = None,
    scheduler: o.SchedulerName = None,
    device: o.Device = None,
    dtype: o.Precision = None,
    agent: o.Agent = None,
) -> None:
    """Measure cost alone: seconds, multiply-adds and, on a GPU, memory; the methods take turns."""
    settings = load_settings(LatencySettings, config, given(locals()))
    from .cost import latency as job

    rivals = job.methods_of(settings)
    output.check_writable(settings.out / "latency.jsonl")
    pipe = job.load(settings)
    cases = job.cases_of(settings, pipe)
    run = results.describe_run(settings, pipe.unet.device)
    rows = []
    with output.progress(console) as bars:
        task = bars.add_task("rounds", total=len(cases) * (settings.repeats + 1))
        for row in job.measure(pipe, cases, rivals, settings, lambda: bars.advance(task)):
            rows.append(row)
            results.write_rows(settings.out, "latency", rows, [job.columns_of(rows, run["clock"])], run)
    for table in job.summary(rows, settings, run["clock"]):
        console.print(table)
    console.print(f"figures: {settings.out}", soft_wrap=True)


@app.command()
@clear_errors
def profile(
    config: o.Config = None,
    model: o.Model = None,
    arch: o.Arch = None,
    methods: o.Methods = None,
    ratio: o.Ratio = None,
    sizes: o.Sizes = None,
    phases: o.Phases = None,
    repeats: o.Repeats = None,
    stock: Annotated[
        bool | None, typer.Option("--stock/--no-stock", help="Measure stock too (minutes a call at 2048 px).")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for profile.jsonl, .csv and .md.")] = None,
    guidance_scale: o.Guidance = None,
    device: o.Device = None,
    dtype: o.Precision = None,
    backend: o.Backend = None,
    agent: o.Agent = None,
) -> None:
    """Print where the time of one U-Net call goes, part by part, under each method."""
    settings = load_settings(ProfileSettings, config, given(locals()))
    from .cost import breakdown as job
    from .cost.latency import load

    rivals = job.methods_of(settings)
    output.check_writable(settings.out / "profile.jsonl")
    pipe = load(settings)
    cases = job.cases_of(settings, pipe)
    run = results.describe_run(settings, pipe.unet.device)
    every: list[results.Row] = []
    tables = []
    with output.progress(console) as bars:
        task = bars.add_task("rounds", total=len(cases) * len(rivals) * (settings.repeats + 1))
        for rows in job.measure(pipe, cases, rivals, settings, lambda: bars.advance(task)):
            tables.append(job.summary(rows, rivals, settings))
            every += rows
            results.write_rows(settings.out, "profile", every, [job.columns_of(rivals)], run)
    for table in tables:
        console.print(table)
    console.print(f"figures: {settings.out}", soft_wrap=True)
