"""Settings by layer, calibrated on a model and prompts, beside the fixed settings they start from."""

from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table

from agentsd import Phases, Recipe, calibrate
from agentsd.attention import Downsample, Operator
from agentsd.hosts import EVERY_LEVEL, find_sites
from agentsd.recipe import stages_of

from ..errors import EvalError
from ..pages.output import check_writable, explain_os_error, make_table, progress
from ..pictures.methods import parse_method
from ..pictures.models import load_pipeline
from ..pictures.prompts import pictures_to_show
from ..pictures.sampling import size_of
from ..settings import CalibrateSettings, recipe_of
from .redundancy import short_name


def command(settings: CalibrateSettings, console: Console) -> None:
    """Calibrate, write the YAML file, print what was found."""
    check_writable(settings.out)
    pipe = load_pipeline(settings)
    with progress(console) as bars:
        task = bars.add_task("trials", total=None)
        found = run(pipe, settings, lambda done, of: bars.update(task, completed=done, total=of))
    save(found, settings)
    console.print(choices(pipe, found))
    console.print(figures(found, settings))
    console.print(note(found), markup=False)
    console.print(f"settings: {settings.out}", soft_wrap=True)


def run(pipe: Any, settings: CalibrateSettings, tick: Callable[[int, int], None]) -> Recipe:
    """Calibrate; `tick` is told how many of how many trials are done.

    Raises EvalError where there is not exactly one goal, or none is met, with what can be had.
    """
    height, width = size_of(pipe, settings)
    try:
        with parse_method("stock", None, settings).applied(pipe):
            return calibrate(
                pipe,
                [picture.prompt for picture in pictures_to_show(settings)],
                speedup=settings.speedup,
                max_error=settings.max_error,
                cost=settings.cost,
                base=recipe_of(settings.agent),
                num_inference_steps=settings.steps,
                guidance_scale=settings.guidance_scale,
                calls=settings.calls,
                seed=settings.seed,
                on_step=tick,
                height=height,
                width=width,
            )
    except ValueError as error:
        raise EvalError(str(error)) from error


def save(found: Recipe, settings: CalibrateSettings) -> None:
    """Write the YAML file. Raises EvalError if that can't be done."""
    try:
        found.save(settings.out)
    except OSError as error:
        raise explain_os_error(error, settings.out) from error


def choices(pipe: Any, found: Recipe) -> Table:
    """Return what each layer of the model runs in each phase as a terminal table."""
    rows = []
    for site in find_sites(pipe.unet, EVERY_LEVEL, at_most=True):
        stages = stages_of((found.layers or {}).get(site.name))
        rows.append([short_name(site.name), str(site.span), _words(stages[0]), _words(stages[-1])])
    share = found.timing.early_frac if isinstance(found.timing, Phases) else 1.0
    early = f"first {share:.0%} of the steps"
    return make_table("what each layer runs", ["layer", "latent px / token", early, "later steps"], rows)


def _words(operator: Operator | None) -> str:
    """Return "agents, r=0.25" for Agents(0.25)."""
    if operator is None or isinstance(operator, Downsample):
        return "stock" if operator is None else operator.name
    ratio = getattr(operator, "ratio", 0)
    return f"{operator.name}, r={ratio:g}" if ratio else operator.name


def figures(found: Recipe, settings: CalibrateSettings) -> Table:
    """Return the measured error and speed-up, beside the fixed settings', as a terminal table."""
    measured = found.measured
    fixed = "fixed, as given" if settings.agent else "fixed, the default"
    rows = [
        [name, f"{row['error']:.3g}", f"{row['speedup']:.3f}x"]
        for name, row in ((fixed, measured["base"]), ("calibrated", measured))
    ]
    clock = {"time": "time", "multiply_adds": "multiply-adds"}[settings.cost]
    run = f"{settings.model}, {measured['calls']} U-Net calls"
    return make_table(run, ["settings", "error of the guided output", f"speed-up ({clock})"], rows)


def note(found: Recipe) -> str:
    """Return what was measured, and on which prompts."""
    prompts = "\n".join(f"  {prompt}" for prompt in found.measured["prompts"])
    return (
        "The error is the change's mean square over the output's own, on calls of stock runs; the speed-up "
        f"is of the U-Net. Calibrated on:\n{prompts}"
    )
