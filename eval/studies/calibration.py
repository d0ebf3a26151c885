"""The recipe that meets a goal on a model and prompts, beside the baseline in fewer steps."""

from pathlib import Path

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
from ..pages.rows import Column, Row, figure, to_terminal
from ..settings import CalibrateSettings

_CLOCKS = {"seconds": "time", "macs": "MACs"}


def command(settings: CalibrateSettings, console: Console) -> None:
    """Calibrate, write the recipe, print what was found."""
    check_writable(settings.out)
    _check_own(settings.out)
    pipe = load_pipeline(settings)
    height, width = size_of(pipe, settings)
    prompts = [spec.prompt for spec in specs_to_show(settings)]
    count = len(prompts) - settings.held_out
    try:
        with parse_method("baseline", None, settings).applied(pipe):
            found = calibrate(
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
        found.save(settings.out)
    except ValueError as error:
        raise EvalError(str(error)) from error
    except OSError as error:
        raise explain_os_error(error, settings.out) from error
    console.print(describe(found.measured["steps"]), markup=False, highlight=False, soft_wrap=True)
    console.print(table_of(found))
    console.print(note(found), markup=False)
    console.print(f"recipe: {settings.out}", soft_wrap=True)


def _check_own(path: Path) -> None:
    """Raise EvalError for a file that no calibration wrote, which would be written over."""
    try:
        if not path.exists() or Recipe.load(path).measured:
            return
    except ValueError:
        pass
    raise EvalError(f"{path} was written by no calibration and stays as it is; choose another --out")


def table_of(found: Recipe) -> Table:
    """Return the figures of the recipe, of fewer steps and of the baseline as a terminal table."""
    environment, validation = (found.measured[name] for name in ("environment", "validation"))
    rows = [{"runs": "calibrated"} | validation]
    rows += [row | {"runs": fewer(row)} for row in validation["fewer_steps"]]
    columns = [
        Column("runs", figure("runs", "")),
        Column(f"speed-up ({_CLOCKS[environment['cost']]})", lambda row: f"{row['speedup']:.3f}x"),
        Column("distance to the baseline", figure("distance", ".3g")),
    ]
    if (far := validation.get("baseline_reference_distance")) is not None:
        columns.append(Column("to reference image", figure("reference_distance", ".3g")))
        rows.append({"runs": "baseline", "speedup": 1.0, "distance": 0.0, "reference_distance": far})
    steps, scheduler = environment["num_inference_steps"], environment["scheduler"]
    return to_terminal(f"{environment['model']}, {steps} steps of {scheduler}", rows, columns)


def fewer(row: Row) -> str:
    """Return what a row of the baseline in fewer steps is called."""
    sampler = f" of {row['sampler']}" if row["sampler"] else ""
    return f"baseline, {row['steps']} steps{sampler}"


def note(found: Recipe) -> str:
    """Return what was measured and on what, and whether fewer steps do as well."""
    environment, validation = (found.measured[name] for name in ("environment", "validation"))
    lines = [
        "Distance: latent relative RMSE, over prompts a geometric mean; speed-up: of a run to its latents."
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
