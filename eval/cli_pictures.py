"""The commands that make pictures and judge them; and what reads such a run, or folders of pictures."""

import io
from pathlib import Path
from typing import Annotated

import typer

from . import options as o
from .command import app, clear_errors, console, given
from .pages import output
from .pages import rows as results
from .pictures.methods import Method
from .settings import CompareSettings, FidSettings, MediatorSettings, RunSettings, load_settings


@app.command()
@clear_errors
def compare(
    config: o.Config = None,
    model: o.Model = None,
    methods: o.Methods = None,
    ratio: o.Ratio = None,
    prompts: o.PromptTexts = None,
    images: Annotated[int | None, typer.Option(help="How many of the embedded model's prompts.")] = None,
    out: Annotated[Path | None, typer.Option(help="The PNG to write.")] = None,
    steps: o.Steps = None,
    guidance_scale: o.Guidance = None,
    scheduler: o.SchedulerName = None,
    seed: o.Seed = None,
    height: o.Height = None,
    width: o.Width = None,
    device: o.Device = None,
    dtype: o.Precision = None,
    backend: o.Backend = None,
    agent: o.Agent = None,
) -> None:
    """Make the same pictures with each method, side by side in one PNG, and print times and differences."""
    settings = load_settings(CompareSettings, config, given(locals()))
    from .pictures.models import load_pipeline
    from .studies import compare as job

    rivals = job.methods_of(settings)
    output.check_writable(settings.out)
    pipe = load_pipeline(settings)
    pictures = job.pictures_to_compare(settings)
    with output.progress(console) as bars:
        task = bars.add_task("pictures", total=len(rivals) * (len(pictures) + 1))
        comparisons = job.compare(pipe, rivals, pictures, settings, lambda: bars.advance(task))
    output.save_image(job.draw(comparisons, pictures), settings.out)
    console.print(job.summary(comparisons, settings, pipe.unet.device))
    console.print(f"pictures: {settings.out}", soft_wrap=True)


def _run_table(settings: RunSettings, methods: list[Method], name: str) -> list[results.Row]:
    from .studies import table as job

    rows = job.run(settings, methods, name, console)
    if not rows:
        return rows
    for title, columns in job.tables_of(rows, settings.features).items():
        console.print(results.to_terminal(title, rows, columns))
    console.print(job.NOTE)
    if advice := job.plan(rows):
        console.print(advice)
    console.print(f"figures: {settings.out}", soft_wrap=True)
    return rows


@app.command()
@clear_errors
def table(
    config: o.Config = None,
    model: o.Model = None,
    methods: o.Methods = None,
    ratios: o.Ratios = None,
    images: o.Images = None,
    batch_size: o.BatchSize = None,
    prompts: o.Prompts = None,
    classes: o.Classes = None,
    reference: o.Reference = None,
    features: o.Features = None,
    inception_weights: o.InceptionWeights = None,
    clip: o.Clip = None,
    out: o.RunOut = None,
    steps: o.Steps = None,
    guidance_scale: o.Guidance = None,
    scheduler: o.SchedulerName = None,
    seed: o.Seed = None,
    height: o.Height = None,
    width: o.Width = None,
    device: o.Device = None,
    dtype: o.Precision = None,
    backend: o.Backend = None,
    agent: o.Agent = None,
) -> None:
    """Make pictures with each method and ratio, and a row of quality and cost for each (Table 10)."""
    settings = load_settings(RunSettings, config, given(locals()))
    from .studies import table as job

    _run_table(settings, job.table_methods(settings), "table")


@app.command()
@clear_errors
def ablate(
    what: Annotated[str, typer.Argument(help="k (Table 11), scale (Table 12) or early (Table 13).")],
    config: o.Config = None,
    model: o.Model = None,
    ablate_values: o.Values = None,
    ablate_ratio: o.Ratio = None,
    images: o.Images = None,
    batch_size: o.BatchSize = None,
    prompts: o.Prompts = None,
    classes: o.Classes = None,
    reference: o.Reference = None,
    features: o.Features = None,
    inception_weights: o.InceptionWeights = None,
    clip: o.Clip = None,
    out: o.RunOut = None,
    steps: o.Steps = None,
    guidance_scale: o.Guidance = None,
    scheduler: o.SchedulerName = None,
    seed: o.Seed = None,
    height: o.Height = None,
    width: o.Width = None,
    device: o.Device = None,
    dtype: o.Precision = None,
    backend: o.Backend = None,
    agent: o.Agent = None,
) -> None:
    """Vary one setting of AgentSD at one ratio, beside stock (Tables 11, 12 and 13)."""
    settings = load_settings(RunSettings, config, given(locals()))
    from .studies import table as job

    _run_table(settings, job.ablation_methods(settings, what), f"ablate-{what}")


@app.command()
@clear_errors
def mediators(
    config: o.Config = None,
    model: o.Model = None,
    mediator_counts: o.MediatorCounts = None,
    mediator_step: o.MediatorStep = None,
    images: o.Images = None,
    batch_size: o.BatchSize = None,
    prompts: o.Prompts = None,
    classes: o.Classes = None,
    reference: o.Reference = None,
    features: o.Features = None,
    inception_weights: o.InceptionWeights = None,
    clip: o.Clip = None,
    out: o.RunOut = None,
    steps: o.Steps = None,
    guidance_scale: o.Guidance = None,
    scheduler: o.SchedulerName = None,
    seed: o.Seed = None,
    height: o.Height = None,
    width: o.Width = None,
    device: o.Device = None,
    dtype: o.Precision = None,
    backend: o.Backend = None,
    agent: o.Agent = None,
) -> None:
    """Search when the number of pooled agents should grow: distance against multiply-adds, drawn."""
    settings = load_settings(MediatorSettings, config, given(locals()))
    from .studies import mediators as job

    rows = _run_table(settings, job.methods_of(settings), "mediators")
    if any(row.get("frechet") is not None for row in rows):
        picture = io.BytesIO()
        job.draw(rows, settings.features).savefig(picture, format="png", dpi=150)
        output.write_bytes(settings.out / "mediators.png", picture.getvalue())
        console.print(f"plot: {settings.out / 'mediators.png'}", soft_wrap=True)


@app.command()
@clear_errors
def fid(
    first: Annotated[
        Path, typer.Argument(help="A folder of pictures, or a .npz in a run's features/.", metavar="DIR_A")
    ],
    second: Annotated[Path, typer.Argument(help="Another.", metavar="DIR_B")],
    features: Annotated[
        str, typer.Option(help="efficientnet-lite0, or inception for real FID.")
    ] = "inception",
    inception_weights: o.InceptionWeights = None,
    cache: Annotated[Path, typer.Option(help="Folder for features, computed once.")] = Path(
        "outputs/features"
    ),
    device: o.Device = None,
) -> None:
    """Measure the Fréchet and kernel distance between two folders of pictures, or a table's features."""
    settings = load_settings(FidSettings, None, given(locals()))
    from .quality import fid as job

    sets = job.sets_of((first, second), settings)
    with output.progress(console) as bars:
        task = bars.add_task("features", total=sum(map(len, sets)))
        row = job.distances(sets, settings, lambda count: bars.advance(task, count))
    console.print(results.to_terminal(f"{first} and {second}", [row], job.columns(settings)))


@app.command()
@clear_errors
def report(
    folder: Annotated[Path, typer.Argument(help="A run's folder.", metavar="RUN_DIR")],
    pictures: Annotated[int, typer.Option(help="How many seeds' pictures are shown.", min=1)] = 12,
) -> None:
    """Write one self-contained HTML page: tables, quality against time, pictures side by side."""
    from .pages.report import write_report

    console.print(f"page: {write_report(folder, pictures)}", soft_wrap=True)
