"""The commands that look into a model: its redundancy, its calibration, a subject taught to it."""

from pathlib import Path
from typing import Annotated

import typer

from . import options as o
from .command import app, clear_errors, console, given
from .pages import output
from .pages import rows as results
from .settings import CalibrateSettings, RedundancySettings, SubjectSettings, load_settings


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
    from .pictures.models import load_pipeline
    from .studies import redundancy as job

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
    from .pictures.models import load_pipeline
    from .studies import calibration as job

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
    from .studies.subject import run
    from .studies.subject_report import summary

    rows, told = run(settings, console)
    for part in (*summary(rows), *told):
        console.print(part)
    console.print(f"pictures and figures: {settings.out}", soft_wrap=True)
