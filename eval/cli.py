"""The command line of `agentsd-eval`: options in, one function call, tables out."""

import functools
import io
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import diffusers
import torch
import transformers
import typer
from rich.console import Console

from . import options as o
from . import output, results
from .config import (
    CalibrateSettings,
    CompareSettings,
    FidSettings,
    LatencySettings,
    MediatorSettings,
    ProfileSettings,
    RedundancySettings,
    RunSettings,
    SubjectSettings,
    load_settings,
)
from .errors import EvalError
from .methods import Method

app = typer.Typer(no_args_is_help=True, add_completion=False)
console = Console()


def clear_errors(command: Callable[..., None]) -> Callable[..., None]:
    """Wrap a command so that an EvalError, or a full GPU, ends it with a message and exit code 2."""

    @functools.wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except EvalError as error:
            message = str(error)
        except torch.OutOfMemoryError:
            message = "the GPU's memory doesn't do; choose a smaller batch or size, or --dtype float16"
        else:
            return
        Console(stderr=True).print(f"[red]error:[/] {output.escape(message)}", soft_wrap=True)
        raise typer.Exit(2)

    return wrapped


def given(options: dict[str, Any]) -> dict[str, Any]:
    """Return the settings among a command's options; they have the settings' names."""
    arguments = {"config", "what", "first", "second"}
    settings = {key: value for key, value in options.items() if key not in arguments}
    if "agent" in settings:
        settings["agent"] = parse_agent(settings["agent"])
    return settings


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
    from . import compare as job
    from .models import load_pipeline

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
    from . import latency as job

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
    out: Annotated[Path | None, typer.Option(help="Folder for profile.jsonl, .csv and .md.")] = None,
    device: o.Device = None,
    dtype: o.Precision = None,
    backend: o.Backend = None,
    agent: o.Agent = None,
) -> None:
    """Print where the time of one U-Net call goes, part by part, under each method."""
    settings = load_settings(ProfileSettings, config, given(locals()))
    from . import breakdown as job
    from .latency import load

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


def _run_table(settings: RunSettings, methods: list[Method], name: str) -> list[results.Row]:
    from . import table as job

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
    from . import table as job

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
    from . import table as job

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
    from . import mediators as job

    rows = _run_table(settings, job.methods_of(settings), "mediators")
    if any(row.get("frechet") is not None for row in rows):
        picture = io.BytesIO()
        job.draw(rows, settings.features).savefig(picture, format="png", dpi=150)
        output.write_bytes(settings.out / "mediators.png", picture.getvalue())
        console.print(f"plot: {settings.out / 'mediators.png'}", soft_wrap=True)


@app.command()
@clear_errors
def redundancy(
    config: o.Config = None,
    model: o.Model = None,
    prompts: o.PromptTexts = None,
    images: Annotated[int | None, typer.Option(help="How many of the embedded model's prompts.")] = None,
    measured_steps: o.MeasuredSteps = None,
    exact_tokens: o.ExactTokens = None,
    pairs: o.Pairs = None,
    out: Annotated[Path | None, typer.Option(help="Folder for redundancy.png, .jsonl, .csv and .md.")] = None,
    steps: o.Steps = None,
    guidance_scale: o.Guidance = None,
    scheduler: o.SchedulerName = None,
    seed: o.Seed = None,
    height: o.Height = None,
    width: o.Width = None,
    device: o.Device = None,
    dtype: o.Precision = None,
) -> None:
    """Measure how alike the queries of each self-attention layer are at each step, and draw the map."""
    settings = load_settings(RedundancySettings, config, given(locals()))
    from . import redundancy as job
    from .models import load_pipeline

    output.check_writable(settings.out / "redundancy.jsonl")
    pipe = load_pipeline(settings)
    pictures = job.pictures_of(settings)
    with output.progress(console) as bars:
        task = bars.add_task("layers", total=job.score_count(pipe, pictures, settings))
        rows = job.measure(pipe, pictures, settings, lambda: bars.advance(task))
    run = results.describe_run(settings, pipe.unet.device)
    results.write_rows(settings.out, "redundancy", rows, [], run, job.markdown(rows, settings))
    output.write_bytes(settings.out / "redundancy.png", job.draw(rows, settings))
    console.print(job.summary(rows, settings))
    console.print(job.note(rows, settings))
    console.print(f"map and figures: {settings.out}", soft_wrap=True)


@app.command()
@clear_errors
def calibrate(
    config: o.Config = None,
    model: o.Model = None,
    prompts: o.PromptTexts = None,
    images: Annotated[int | None, typer.Option(help="How many of the embedded model's prompts.")] = None,
    speedup: Annotated[float | None, typer.Option(help="The goal: how much cheaper a U-Net call.")] = None,
    max_error: Annotated[float | None, typer.Option(help="Or the goal: the largest error.")] = None,
    cost: Annotated[str | None, typer.Option(help="time or multiply_adds.")] = None,
    calls: Annotated[int | None, typer.Option(help="U-Net calls measured of each prompt's run.")] = None,
    out: Annotated[Path | None, typer.Option(help="The YAML file to write.")] = None,
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
    """Find what each self-attention layer should run in each phase, on your prompts, for a goal."""
    settings = load_settings(CalibrateSettings, config, given(locals()))
    from . import calibration as job
    from .models import load_pipeline

    output.check_writable(settings.out)
    pipe = load_pipeline(settings)
    with output.progress(console) as bars:
        task = bars.add_task("trials", total=None)
        found = job.run(pipe, settings, lambda done, of: bars.update(task, completed=done, total=of))
    job.save(found, settings)
    console.print(job.choices(pipe, found))
    console.print(job.figures(found, settings))
    console.print(job.note(found), markup=False)
    console.print(f"settings: {settings.out}", soft_wrap=True)


@app.command()
@clear_errors
def subject(
    config: o.Config = None,
    model: o.Model = None,
    subject: o.Subject = None,
    instance_prompt: o.InstancePrompt = None,
    class_prompt: o.ClassPrompt = None,
    ratio: o.Ratio = None,
    train_steps: o.TrainSteps = None,
    learning_rate: o.LearningRate = None,
    class_images: o.ClassImages = None,
    images: Annotated[int | None, typer.Option(help="Pictures of the subject for each row.")] = None,
    other_prompts: o.OtherPrompts = None,
    out: o.RunOut = None,
    steps: o.Steps = None,
    guidance_scale: o.Guidance = None,
    subject_guidance_scale: o.SubjectGuidance = None,
    scheduler: o.SchedulerName = None,
    seed: o.Seed = None,
    device: o.Device = None,
    backend: o.Backend = None,
    agent: o.Agent = None,
) -> None:
    """Teach the model a subject with and without agent attention, and compare how it draws it (Fig. 8)."""
    settings = load_settings(SubjectSettings, config, given(locals()))
    from .subject import run
    from .subject_report import summary

    rows, told = run(settings, console)
    for part in (*summary(rows), *told):
        console.print(part)
    console.print(f"pictures and figures: {settings.out}", soft_wrap=True)


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
    from . import fid as job

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
    from .report import write_report

    console.print(f"page: {write_report(folder, pictures)}", soft_wrap=True)


def main() -> None:
    """Run the program (the script `agentsd-eval`)."""
    app()


if __name__ == "__main__":
    main()
