"""The command line of `agentsd-eval`: options in, one function call, tables out."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import diffusers
import transformers
import typer
from rich.console import Console

from . import output, results
from .config import CompareSettings, LatencySettings, load_settings
from .errors import EvalError

app = typer.Typer(no_args_is_help=True, add_completion=False)
console = Console()

Config = Annotated[
    Path | None, typer.Option("--config", help="YAML file of settings; options here override it.")
]
Model = Annotated[str | None, typer.Option(help="'demo' (embedded), a folder, or a hub id.")]
Methods = Annotated[
    list[str] | None,
    typer.Option(
        "--method", help="stock, tomesd, agentsd, deepcache or a sum such as agentsd+deepcache; repeat."
    ),
]
Steps = Annotated[int | None, typer.Option(help="Denoising steps.")]
Guidance = Annotated[float | None, typer.Option("--guidance", help="Guidance scale; 1 or less turns it off.")]
SchedulerName = Annotated[
    str | None, typer.Option("--scheduler", help="plms, ddim, euler, dpm++ or model (its own).")
]
Seed = Annotated[int | None, typer.Option(help="Picture i has seed + i.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 ...; default: CUDA if there is one.")]
Precision = Annotated[str | None, typer.Option("--dtype", help="float32, float16 or bfloat16.")]
Backend = Annotated[str | None, typer.Option(help="Attention of the baseline: sdpa (fused) or unfused.")]
Height = Annotated[int | None, typer.Option(help="Pixels, a multiple of 8; default: the model's own.")]
Width = Annotated[int | None, typer.Option(help="Pixels, a multiple of 8; default: the model's own.")]
Ratio = Annotated[float | None, typer.Option(help="Share of the tokens that is merged.")]
Agent = Annotated[
    list[str] | None,
    typer.Option("--agent", metavar="KEY=VALUE", help="A setting of apply_agentsd, such as k=0.05; repeat."),
]


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
    config: Config = None,
    model: Model = None,
    method: Methods = None,
    ratio: Ratio = None,
    prompt: Annotated[
        list[str] | None, typer.Option(help="A prompt; repeat. Default: the model's own.")
    ] = None,
    images: Annotated[int | None, typer.Option(help="How many of the embedded model's prompts.")] = None,
    out: Annotated[Path | None, typer.Option(help="The PNG to write.")] = None,
    steps: Steps = None,
    guidance: Guidance = None,
    scheduler: SchedulerName = None,
    seed: Seed = None,
    height: Height = None,
    width: Width = None,
    device: Device = None,
    dtype: Precision = None,
    backend: Backend = None,
    agent: Agent = None,
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
    config: Config = None,
    model: Model = None,
    arch: Annotated[
        str | None, typer.Option(help="sd15 or sdxl, random weights, in place of a model.")
    ] = None,
    method: Methods = None,
    ratio: Ratio = None,
    size: Annotated[list[int] | None, typer.Option(help="Pixels on a side; repeat.")] = None,
    batch: Annotated[list[int] | None, typer.Option(help="Pictures at once; repeat.")] = None,
    scope: Annotated[
        list[str] | None, typer.Option(help="forward (one U-Net call), pipeline; repeat.")
    ] = None,
    backend: Annotated[list[str] | None, typer.Option(help="sdpa or unfused attention; repeat.")] = None,
    repeats: Annotated[int | None, typer.Option(help="Timed rounds; the median counts.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for latency.jsonl, .csv and .md.")] = None,
    steps: Steps = None,
    guidance: Guidance = None,
    scheduler: SchedulerName = None,
    device: Device = None,
    dtype: Precision = None,
    agent: Agent = None,
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
    columns = job.columns_of(pipe.unet.device)
    rows = []
    with output.progress(console) as bars:
        task = bars.add_task("rounds", total=len(cases) * (settings.repeats + 1))
        for row in job.measure(pipe, cases, methods, settings, lambda: bars.advance(task)):
            rows.append(row)
            results.write_rows(settings.out, "latency", rows, columns, run)
    for table in job.summary(rows, settings, pipe.unet.device):
        console.print(table)
    console.print(f"figures: {settings.out}", soft_wrap=True)


def main() -> None:
    """Run the program (the script `agentsd-eval`)."""
    app()


if __name__ == "__main__":
    main()
