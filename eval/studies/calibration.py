"""Settings by layer or by call, calibrated on a model and prompts, beside what they are compared with."""

from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table

from agentsd import Phases, Recipe, calibrate
from agentsd.attention import Downsample, Operator
from agentsd.calibration import calibrate_calls
from agentsd.hosts import EVERY_LEVEL, find_sites
from agentsd.recipe import stages_of
from agentsd.reuse.plan import tell

from ..errors import EvalError
from ..pages.output import check_writable, explain_os_error, make_table, progress
from ..pictures.methods import parse_method
from ..pictures.models import load_pipeline
from ..pictures.prompts import pictures_to_show
from ..pictures.sampling import size_of
from ..settings import CalibrateSettings, recipe_of
from .redundancy import short_name

_CLOCKS = {"time": "time", "multiply_adds": "multiply-adds"}


def command(settings: CalibrateSettings, console: Console) -> None:
    """Calibrate, write the YAML file, print what was found."""
    check_writable(settings.out)
    pipe = load_pipeline(settings)
    with progress(console) as bars:
        task = bars.add_task("trials", total=None)
        found = run(pipe, settings, lambda done, of: bars.update(task, completed=done, total=of))
    save(found, settings)
    if settings.whole_calls:
        console.print(tell(found.measured["plan"]), markup=False, highlight=False, soft_wrap=True)
        console.print(call_figures(found, settings))
        console.print(call_note(found), markup=False)
    else:
        console.print(choices(pipe, found))
        console.print(figures(found, settings))
        console.print(note(found), markup=False)
    console.print(f"settings: {settings.out}", soft_wrap=True)


def run(pipe: Any, settings: CalibrateSettings, tick: Callable[[int, int], None]) -> Recipe:
    """Calibrate; `tick` is told how many of how many trials are done.

    Raises EvalError where there is not exactly one goal, or none is met, with what can be had.
    """
    height, width = size_of(pipe, settings)
    prompts = [picture.prompt for picture in pictures_to_show(settings)]
    shared: dict[str, Any] = {
        "speedup": settings.speedup,
        "cost": settings.cost,
        "num_inference_steps": settings.steps,
        "guidance_scale": settings.guidance_scale,
        "seed": settings.seed,
        "on_step": tick,
        "height": height,
        "width": width,
    }
    try:
        with parse_method("stock", None, settings).applied(pipe):
            if settings.whole_calls:
                return calibrate_calls(pipe, prompts, max_distance=settings.max_distance, **shared)
            return calibrate(
                pipe,
                prompts,
                max_error=settings.max_error,
                base=recipe_of(settings.agent),
                calls=settings.calls,
                **shared,
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
    clock = _CLOCKS[settings.cost]
    run = f"{settings.model}, {measured['calls']} U-Net calls"
    return make_table(run, ["settings", "error of the guided output", f"speed-up ({clock})"], rows)


def call_figures(found: Recipe, settings: CalibrateSettings) -> Table:
    """Return the speed-up and distance of the plan and of fewer steps as a terminal table."""
    measured = found.measured
    rows = [("calibrated", measured), ("as predicted", measured["predicted"])]
    rows += [(f"stock, {row['steps']} steps", row) for row in measured["fewer_steps"]]
    run = f"{settings.model}, {measured['steps']} steps of {measured['sampler']}"
    heads = ["runs", "distance of the final latents", f"speed-up ({_CLOCKS[settings.cost]})"]
    cells = [[name, f"{row['distance']:.3g}", f"{row['speedup']:.3f}x"] for name, row in rows]
    return make_table(run, heads, cells)


def call_note(found: Recipe) -> str:
    """Return what was measured, whether fewer steps do as well, and the prompts."""
    prompts = "\n".join(f"  {prompt}" for prompt in found.measured["prompts"])
    beaten = "Fewer steps of the same sampler end nearer to stock at this cost: use those. "
    return (
        f"{beaten if found.measured['beaten_by_fewer_steps'] else ''}The distance is the root mean square of "
        "the change of the final latents over theirs; the speed-up is of the U-Net's calls in a run. "
        f"Calibrated on:\n{prompts}"
    )


def note(found: Recipe) -> str:
    """Return what was measured, and on which prompts."""
    prompts = "\n".join(f"  {prompt}" for prompt in found.measured["prompts"])
    return (
        "The error is the change's mean square over the output's own, on calls of stock runs; the speed-up "
        f"is of the U-Net. Calibrated on:\n{prompts}"
    )
