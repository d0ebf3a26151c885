"""A run planned for a goal on a model and prompts, beside the baseline in fewer steps."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from agentsd import Phases, Recipe, calibrate
from agentsd.attention import Downsample, Operator
from agentsd.cache.plan import tell
from agentsd.calibration.attention import OPERATORS
from agentsd.hosts.models import EVERY_LEVEL, find_sites
from agentsd.schedule import stages_of

from ..errors import EvalError
from ..pages.output import check_writable, explain_os_error, make_table, progress
from ..pages.rows import Row
from ..pictures.methods import parse_method
from ..pictures.models import load_pipeline
from ..pictures.prompts import pictures_to_show
from ..pictures.sampling import size_of
from ..settings import CalibrateSettings
from .redundancy import short_name

_CLOCKS = {"time": "time", "macs": "MACs"}


def command(settings: CalibrateSettings, console: Console) -> None:
    """Calibrate, write the YAML file, print what was found."""
    check_writable(settings.out)
    pipe = load_pipeline(settings)
    with progress(console) as bars:
        task = bars.add_task("figures", total=None)
        found = run(pipe, settings, lambda done, of: bars.update(task, completed=done, total=of))
    save(found, settings.out)
    console.print(tell(found.measured["plan"]), markup=False, highlight=False, soft_wrap=True)
    if found.layers is not None:
        console.print(choices(pipe, found))
    console.print(figures(found))
    console.print(note(found), markup=False)
    console.print(f"recipe: {settings.out}", soft_wrap=True)


def run(pipe: Any, settings: CalibrateSettings, tick: Callable[[int, int], None]) -> Recipe:
    """Calibrate; `tick` is told how many of how many figures are there.

    Raises EvalError for what can't be calibrated, or a goal that can't be met, with what can be had.
    """
    height, width = size_of(pipe, settings)
    prompts = [picture.prompt for picture in pictures_to_show(settings)]
    count = len(prompts) - settings.held_out
    try:
        with parse_method("baseline", None, settings).applied(pipe):
            return calibrate(
                pipe,
                prompts[:count],
                speedup=settings.speedup,
                max_distance=settings.max_distance,
                held_out=prompts[count:],
                reference_steps=settings.reference_steps,
                cost=settings.cost,
                operators=OPERATORS if settings.attention else (),
                num_inference_steps=settings.steps,
                guidance_scale=settings.guidance_scale,
                seed=settings.seed,
                resume=settings.out.with_suffix(".jsonl"),
                on_step=tick,
                height=height,
                width=width,
            )
    except ValueError as error:
        raise EvalError(str(error)) from error


def save(found: Recipe, path: Path) -> None:
    """Write the YAML file. Raises EvalError if that can't be done."""
    try:
        found.save(path)
    except OSError as error:
        raise explain_os_error(error, path) from error


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
        return "full" if operator is None else operator.name
    ratio = getattr(operator, "ratio", 0)
    return f"{operator.name}, r={ratio:g}" if ratio else operator.name


def figures(found: Recipe) -> Table:
    """Return the speed-up and distance of the recipe and of fewer steps as a terminal table."""
    made_on, promises = (found.measured[name] for name in ("made_on", "promises"))
    rows = [("calibrated", promises)]
    rows += [(fewer(row), row) for row in promises["fewer_steps"]]
    title = f"{made_on['model']}, {made_on['steps']} steps of {made_on['sampler']}"
    heads = ["runs", f"speed-up ({_CLOCKS[made_on['cost']]})", "distance to the baseline"]
    cells = [[name, f"{row['speedup']:.3f}x", f"{row['distance']:.3g}"] for name, row in rows]
    if "reference_distance" in promises:
        heads.append("to reference image")
        cells = [
            [*line, f"{row['reference_distance']:.3g}"] for line, (_, row) in zip(cells, rows, strict=True)
        ]
        cells.append(["baseline", "1.000x", "0", f"{promises['baseline_reference']:.3g}"])
    return make_table(title, heads, cells)


def fewer(row: Row) -> str:
    """Return what a row of the baseline in fewer steps is called."""
    return f"baseline, {row['steps']} {'chosen ' if row.get('chosen') else ''}steps"


def note(found: Recipe) -> str:
    """Return what was measured and on what, and whether fewer steps do as well."""
    made_on, promises = (found.measured[name] for name in ("made_on", "promises"))
    lines = [
        "A distance is the root mean square of the change of the final latents over theirs (over prompts a "
        "geometric mean); the speed-up is of the U-Net's calls in a run."
    ]
    if promises["beaten_by_fewer_steps"]:
        most = max(row["steps"] for row in promises["fewer_steps"])
        rows = [row for row in promises["fewer_steps"] if row["steps"] == most]
        anchor = "reference runs" if "reference_distance" in promises else "the baseline's own run"
        nearest = min(rows, key=lambda row: row.get("reference_distance", row["distance"]))
        levels = ", ".join(f"{level:g}" for level in nearest["timesteps"])
        lines.append(
            f"Fewer steps of the same sampler end nearer to {anchor} at this cost: use fewer steps, "
            f"{most}, at these noise levels (the pipeline's timesteps): {levels}."
        )
    held_out = "held-out prompts" if promises["held_out"] else "of the prompts that it was chosen by"
    lines.append(f"Measured on {promises['prompts']} {held_out}. Chosen on:")
    return "\n".join([*lines, *(f"  {prompt}" for prompt in made_on["prompts"])])
