"""The command line of `agentsd-eval`: options in, one function call, tables out."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import diffusers
import transformers
import typer
from rich.console import Console

from . import options as o
from . import output, results
from .config import (
    CompareSettings,
    FidSettings,
    LatencySettings,
    RunSettings,
    load_settings,
)
from .errors import EvalError
from .methods import Method

app = typer.Typer(no_args_is_help=True, add_completion=False)
console = Console()


def clear_errors(command: Callable[..., None]) -> Callable[..., None]:
    """Wrap a command so that an EvalError, or a full disk, ends it with a message and exit code 2."""

    @functools.wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except EvalError as error:
            Console(stderr=True).print(f"[red]error:[/] {output.escape(str(error))}", soft_wrap=True)
            raise typer.Exit(2) from None

    return wrapped


def parse_agent(pairs: list[str] | None) -> dict[str, Any] | None:
    """Return {"k": 0.05} for ["k=0.05"]; values are read as YAML. Raises EvalError on a pair without "="."""
    if not pairs:
        return None
    values = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not value:
            raise EvalError(f"--agent {pair!r} must be KEY=VALUE, such as k=0.05")
        values[key] = output.read_scalar(value)
    return values


@app.callback()
def start() -> None:
    """Quality and cost of agent attention (AgentSD) beside stock Stable Diffusion, ToMeSD and DeepCache."""
    # The libraries' remarks and bars would stand between a user and the table.
    for library in (diffusers.utils.logging, transformers.utils.logging):
        library.set_verbosity_error()
        library.disable_progress_bar()


@app.command()
@clear_errors
def compare(
    config: o.Config = None,
    model: o.Model = None,
    method: o.Methods = None,
    ratio: o.Ratio = None,
    prompt: Annotated[
        list[str] | None, typer.Option(help="A prompt; repeat. Default: the model's own.")
    ] = None,
    images: Annotated[int | None, typer.Option(help="How many of the embedded model's prompts.")] = None,
    out: Annotated[Path | None, typer.Option(help="The PNG to write.")] = None,
    steps: o.Steps = None,
    guidance: o.Guidance = None,
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
    from . import compare as job
    from .models import load_pipeline

    overrides = dict(
        model=model, methods=method, ratio=ratio, prompts=prompt, images=images, out=out, steps=steps,
        guidance_scale=guidance, scheduler=scheduler, seed=seed, height=height, width=width, device=device,
        dtype=dtype, backend=backend, agent=parse_agent(agent),
    )  # fmt: skip
    settings = load_settings(CompareSettings, config, overrides)
    methods = job.methods_of(settings)
    output.check_writable(settings.out)
    pipe = load_pipeline(settings)
    pictures = job.pictures_to_compare(settings)
    with output.progress(console) as bars:
        task = bars.add_task("pictures", total=len(methods) * (len(pictures) + 1))
        comparisons = job.compare(pipe, methods, pictures, settings, lambda: bars.advance(task))
    output.save_image(job.draw(comparisons, pictures), settings.out)
    console.print(job.summary(comparisons, settings, pipe.unet.device))
    console.print(f"pictures: {settings.out}", soft_wrap=True)


@app.command()
@clear_errors
def latency(
    config: o.Config = None,
    model: o.Model = None,
    arch: Annotated[
        str | None, typer.Option(help="sd15 or sdxl, random weights, in place of a model.")
    ] = None,
    method: o.Methods = None,
    ratio: o.Ratio = None,
    size: Annotated[list[int] | None, typer.Option(help="Pixels on a side; repeat.")] = None,
    batch: Annotated[list[int] | None, typer.Option(help="Pictures at once; repeat.")] = None,
    scope: Annotated[
        list[str] | None, typer.Option(help="forward (one U-Net call), pipeline; repeat.")
    ] = None,
    backend: Annotated[list[str] | None, typer.Option(help="sdpa or unfused attention; repeat.")] = None,
    repeats: Annotated[int | None, typer.Option(help="Timed rounds; the median counts.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for latency.jsonl, .csv and .md.")] = None,
    steps: o.Steps = None,
    guidance: o.Guidance = None,
    scheduler: o.SchedulerName = None,
    device: o.Device = None,
    dtype: o.Precision = None,
    agent: o.Agent = None,
) -> None:
    """Measure cost alone: seconds, multiply-adds and, on a GPU, memory; the methods take turns."""
    from . import latency as job

    overrides = dict(
        model=model, arch=arch, methods=method, ratio=ratio, sizes=size, batches=batch, scopes=scope,
        backends=backend, repeats=repeats, out=out, steps=steps, guidance_scale=guidance,
        scheduler=scheduler, device=device, dtype=dtype, agent=parse_agent(agent),
    )  # fmt: skip
    settings = load_settings(LatencySettings, config, overrides)
    methods = job.methods_of(settings)
    output.check_writable(settings.out / "latency.jsonl")
    pipe = job.load(settings)
    cases = job.cases_of(settings, pipe)
    run = results.describe_run(settings, pipe.unet.device)
    rows = []
    with output.progress(console) as bars:
        task = bars.add_task("rounds", total=len(cases) * (settings.repeats + 1))
        for row in job.measure(pipe, cases, methods, settings, lambda: bars.advance(task)):
            rows.append(row)
            results.write_rows(settings.out, "latency", rows, [job.columns_of(rows, run["clock"])], run)
    for table in job.summary(rows, settings, run["clock"]):
        console.print(table)
    console.print(f"figures: {settings.out}", soft_wrap=True)


def _run_table(settings: RunSettings, methods: list[Method], name: str) -> None:
    from . import table as job

    rows = job.run(settings, methods, name, console)
    if not rows:
        return
    for title, columns in job.tables_of(rows, settings.features).items():
        console.print(results.to_terminal(title, rows, columns))
    console.print(job.NOTE)
    if advice := job.plan(rows):
        console.print(advice)
    console.print(f"figures: {settings.out}", soft_wrap=True)


@app.command()
@clear_errors
def table(
    config: o.Config = None,
    model: o.Model = None,
    method: o.Methods = None,
    ratio: Annotated[list[float] | None, typer.Option(help="Share of tokens merged; repeat.")] = None,
    images: o.Images = None,
    batch_size: o.BatchSize = None,
    prompts: o.Prompts = None,
    classes: o.Classes = None,
    reference: o.Reference = None,
    features: o.Features = None,
    inception_weights: o.InceptionWeights = None,
    out: o.RunOut = None,
    steps: o.Steps = None,
    guidance: o.Guidance = None,
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
    from . import table as job

    overrides = dict(
        model=model, methods=method, ratios=ratio, images=images, batch_size=batch_size, prompts=prompts,
        classes=classes, reference=reference, features=features, inception_weights=inception_weights, out=out,
        steps=steps, guidance_scale=guidance, scheduler=scheduler, seed=seed, height=height, width=width,
        device=device, dtype=dtype, backend=backend, agent=parse_agent(agent),
    )  # fmt: skip
    settings = load_settings(RunSettings, config, overrides)
    _run_table(settings, job.table_methods(settings), "table")


@app.command()
@clear_errors
def ablate(
    what: Annotated[str, typer.Argument(help="k (Table 11), scale (Table 12) or early (Table 13).")],
    config: o.Config = None,
    model: o.Model = None,
    value: Annotated[list[float] | None, typer.Option(help="A value; repeat. Default: the paper's.")] = None,
    ratio: o.Ratio = None,
    images: o.Images = None,
    batch_size: o.BatchSize = None,
    prompts: o.Prompts = None,
    classes: o.Classes = None,
    reference: o.Reference = None,
    features: o.Features = None,
    inception_weights: o.InceptionWeights = None,
    out: o.RunOut = None,
    steps: o.Steps = None,
    guidance: o.Guidance = None,
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
    from . import table as job

    overrides = dict(
        model=model, ablate_values=value, ablate_ratio=ratio, images=images, batch_size=batch_size,
        prompts=prompts,
        classes=classes, reference=reference, features=features, inception_weights=inception_weights, out=out,
        steps=steps, guidance_scale=guidance, scheduler=scheduler, seed=seed, height=height, width=width,
        device=device, dtype=dtype, backend=backend, agent=parse_agent(agent),
    )  # fmt: skip
    settings = load_settings(RunSettings, config, overrides)
    _run_table(settings, job.ablation_methods(settings, what), f"ablate-{what}")


@app.command()
@clear_errors
def fid(
    first: Annotated[Path, typer.Argument(help="A folder of pictures.", metavar="DIR_A")],
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
    """Measure the Fréchet and kernel distance between two folders of pictures."""
    from . import fid as job

    overrides = dict(features=features, inception_weights=inception_weights, cache=cache, device=device)
    settings = load_settings(FidSettings, None, overrides)
    pictures = job.pictures_of(first, second)
    with output.progress(console) as bars:
        task = bars.add_task("features", total=sum(map(len, pictures)))
        row = job.distances(pictures, settings, lambda count: bars.advance(task, count))
    console.print(results.to_terminal(f"{first} and {second}", [row], job.columns(settings)))


@app.command()
@clear_errors
def report(
    folder: Annotated[Path, typer.Argument(help="A run's folder.", metavar="RUN_DIR")],
    pictures: Annotated[int, typer.Option(help="How many seeds' pictures are shown.", min=1)] = 12,
) -> None:
    """Write one self-contained HTML page: tables, quality against time, pictures side by side."""
    from .report import write_report

    console.print(f"page: {write_report(folder, pictures)}", soft_wrap=True)


def main() -> None:
    """Run the program (the script `agentsd-eval`)."""
    app()


if __name__ == "__main__":
    main()
