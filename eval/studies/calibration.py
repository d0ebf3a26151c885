"""The recipe that meets a goal on a model and prompts, beside the baseline in fewer steps."""

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from agentsd import Recipe
from agentsd.plan import describe

from ..calibration.search import calibrate
from ..errors import EvalError
from ..files import check_writable, explain_os_error
from ..images.methods import parse_method
from ..images.models import load_pipeline
from ..images.prompts import specs_to_show
from ..images.sampling import size_of
from ..pages.rows import Row, make_table
from ..settings import CalibrateSettings

_CLOCKS = {"seconds": "time", "macs": "MACs"}


def command(settings: CalibrateSettings, console: Console) -> None:
    """Calibrate, write the recipe, print what was found."""
    check_writable(settings.out)
    if settings.out.exists():
        try:
            Recipe.load(settings.out)
        except ValueError:
            raise EvalError(f"{settings.out} is no recipe and stays as it is; choose another --out") from None
    pipe = load_pipeline(settings)
    found = run(pipe, settings)
    save(found, settings.out)
    console.print(describe(found.measured["steps"]), markup=False, highlight=False, soft_wrap=True)
    console.print(figures(found))
    console.print(note(found), markup=False)
    console.print(f"recipe: {settings.out}", soft_wrap=True)


def run(pipe: Any, settings: CalibrateSettings) -> Recipe:
    """Calibrate. Raises EvalError for what can't be calibrated, or a goal that can't be met."""
    height, width = size_of(pipe, settings)
    prompts = [spec.prompt for spec in specs_to_show(settings)]
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
                num_inference_steps=settings.steps,
                guidance_scale=settings.guidance_scale,
                seed=settings.seed,
                resume=settings.out.with_suffix(".jsonl"),
                height=height,
                width=width,
            )
    except ValueError as error:
        raise EvalError(str(error)) from error


def save(found: Recipe, path: Path) -> None:
    """Write the recipe. Raises EvalError if that can't be done."""
    try:
        found.save(path)
    except OSError as error:
        raise explain_os_error(error, path) from error


def figures(found: Recipe) -> Table:
    """Return the speed-up and distance of the recipe and of fewer steps as a terminal table."""
    environment, validation = (found.measured[name] for name in ("environment", "validation"))
    rows = [("calibrated", validation)]
    rows += [(fewer(row), row) for row in validation["fewer_steps"]]
    title = (
        f"{environment['model']}, {environment['num_inference_steps']} steps of {environment['scheduler']}"
    )
    heads = ["runs", f"speed-up ({_CLOCKS[environment['cost']]})", "distance to the baseline"]
    cells = [[name, f"{row['speedup']:.3f}x", f"{row['distance']:.3g}"] for name, row in rows]
    if "reference_distance" in validation:
        heads.append("to reference image")
        cells = [
            [*line, f"{row['reference_distance']:.3g}"] for line, (_, row) in zip(cells, rows, strict=True)
        ]
        cells.append(["baseline", "1.000x", "0", f"{validation['baseline_reference_distance']:.3g}"])
    return make_table(title, heads, cells)


def fewer(row: Row) -> str:
    """Return what a row of the baseline in fewer steps is called."""
    sampler = f" of {row['sampler']}" if row["sampler"] else ""
    return f"baseline, {row['steps']} steps{sampler}"


def note(found: Recipe) -> str:
    """Return what was measured and on what, and whether fewer steps do as well."""
    environment, validation = (found.measured[name] for name in ("environment", "validation"))
    lines = [
        "Distance is the latent relative RMSE, over prompts a geometric mean; the speed-up is of the U-Net's "
        "calls in a run."
    ]
    if validation["beaten_by_fewer_steps"]:
        to = "reference" if "reference_distance" in validation else "baseline"
        name = "reference_distance" if to == "reference" else "distance"
        nearest = min(validation["fewer_steps"], key=lambda row: row[name])
        lines.append(
            f"Fewer steps without a recipe end nearer to the {to} at this cost: use the {fewer(nearest)}."
        )
    held_out = "held-out prompts" if validation["held_out"] else "of the prompts that it was chosen by"
    lines.append(f"Measured on {validation['prompts']} {held_out}. Chosen on:")
    return "\n".join([*lines, *(f"  {prompt}" for prompt in environment["prompts"])])
