"""Tables 10 to 13: pictures of every method, then a row of quality and cost for each."""

import statistics
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from accelerate import PartialState
from rich.console import Console

from agentsd.calibration.cost import multiply_adds

from ..cost.memory import memory_per_image
from ..errors import EvalError
from ..pages import rows as results
from ..pages.output import check_writable, progress
from ..pages.rows import Column, Row, distance_name, figure
from ..pictures.generate import Share, fingerprint, generate
from ..pictures.methods import Method, expand, parse_method
from ..pictures.models import find_device, load_pipeline
from ..pictures.prompts import Picture, pictures_of
from ..pictures.sampling import Seconds, sample, size_of
from ..pictures.store import Entry, Store
from ..quality import metrics
from ..quality.judge import Judge, load_real
from ..settings import RunSettings

PAPER_VALUES: dict[str, tuple[float, ...]] = {
    "k": (0.0, 0.025, 0.075, 0.15),
    "scale": (-0.5, -0.25, -0.15, -0.05),
    "early": (0.2, 0.4, 0.6, 0.8),
}
"""What Tables 11, 12 and 13 vary."""
_SETTING = {"k": "k", "scale": "scale", "early": "early_frac"}


def table_methods(settings: RunSettings) -> list[Method]:
    """Return the rows of Table 10: stock, then every method at every ratio."""
    return expand(settings.methods, settings.ratios, settings)


def ablation_methods(settings: RunSettings, what: str) -> list[Method]:
    """Return stock and AgentSD at each value of "k", "scale" or "early"."""
    if what not in PAPER_VALUES:
        raise EvalError(f"can't ablate {what!r}; choose k (Table 11), scale (Table 12) or early (Table 13)")
    methods = [parse_method("stock", None, settings)]
    for value in settings.ablate_values or PAPER_VALUES[what]:
        agent = {**settings.agent, _SETTING[what]: value}
        methods.append(
            parse_method("agentsd", settings.ablate_ratio, settings.model_copy(update={"agent": agent}))
        )
    return methods


def run(settings: RunSettings, methods: list[Method], name: str, console: Console) -> list[Row]:
    """Make what pictures are missing, judge them all, and write `name` and `name`-pictures in `out`.

    Under `accelerate launch` the processes share the batches; the first one judges and writes, and the
    others return no rows. Everything that can be wrong is looked at before the first picture.
    """
    state = PartialState(cpu=find_device(settings.device).type == "cpu", timeout=timedelta(days=7))
    if state.num_processes > 1 and state.device.type == "cuda":
        settings = settings.model_copy(update={"device": str(state.device)})
    check_writable(settings.out / f"{name}.jsonl")
    pictures = pictures_of(settings)
    pipe = load_pipeline(settings)
    height, width = size_of(pipe, settings)
    real = load_real(settings, height, width)
    judge = Judge(settings, pictures, real, pipe.unet.device)
    store = Store(settings.out, state.process_index)
    with state.main_process_first():
        store.claim(fingerprint(pipe, pictures, settings))
    share = Share(state.process_index, state.num_processes)
    with progress(console, disable=not state.is_main_process) as bars:
        if state.is_main_process and real is not None:
            first = bars.add_task("real pictures", total=len(real.pictures))
            judge.read_real(lambda n: bars.advance(first, n))
        task = bars.add_task("pictures", total=-(-len(pictures) * len(methods) // share.world))
        generate(pipe, store, methods, pictures, settings, share, lambda n: bars.advance(task, n))
        state.wait_for_everyone()
        if not state.is_main_process:
            return []
        task = bars.add_task("features", total=len(pictures) * len(methods))
        rows, singles = judge.judge(store, methods, lambda n: bars.advance(task, n))
    costs = _costs(pipe, store, methods, pictures, settings)
    rows = [identity(m, settings) | row | cost for m, row, cost in zip(methods, rows, costs, strict=True)]
    if floor := judge.floor():
        rows.append(floor)
    run_facts = results.describe_run(settings, pipe.unet.device)
    tables = list(tables_of(rows, settings.features).values())
    results.write_rows(settings.out, name, rows, tables, run_facts, NOTE)
    results.write_csv(settings.out / f"{name}-pictures.csv", singles)
    return rows


def identity(method: Method, settings: RunSettings) -> Row:
    """Return which method a row is of."""
    agent = ", ".join(f"{key}={value}" for key, value in method.agent)
    named = bool(set(method.parts) & set(settings.named))  # whose settings stand under that name
    return {
        "method": method.name,
        "ratio": method.ratio,
        "backend": method.backend,
        "key": method.key,
        "agent": agent or None,
        "label": f"{method.label}, {agent}" if agent and not named else method.label,
    }


def _costs(
    pipe: Any, store: Store, methods: Sequence[Method], pictures: Sequence[Picture], settings: RunSettings
) -> list[Row]:
    """Return seconds a picture, speed-up against stock where both ran in one session, and GB a picture."""
    device = pipe.unet.device
    stock = store.timings(methods[0])
    rows = []
    for method in methods:
        ours = store.timings(method)
        both = [_charged(stock[key], device) / _charged(ours[key], device) for key in ours if key in stock]

        def call(batch: int, method: Method = method) -> None:
            wanted = [pictures[i % len(pictures)] for i in range(batch)]
            sample(pipe, method, wanted, settings)

        counted = min(settings.count_on, len(pictures))
        rows.append(
            {
                "seconds": statistics.median(e.seconds / e.batch_images for e in ours.values()),
                "cpu_seconds": statistics.median(e.cpu_seconds / e.batch_images for e in ours.values()),
                "speedup": statistics.median(both) if both else None,
                "speedup_batches": len(both),
                "memory_per_image": memory_per_image(call, settings.batch_size, device),
                "multiply_adds": multiply_adds(partial(call, counted)) // counted,
            }
        )
    return rows


def _charged(entry: Entry, device: torch.device) -> float:
    return Seconds(entry.seconds, entry.cpu_seconds).charged(device)


def row_label(row: Row) -> str:
    """Return what a row is called: a name of the user's own, or its method, ratio and settings."""
    return row.get("label") or results.method_text(row)


def change(key: str, form: str, factor: float = 1.0) -> Any:
    """Return a column's text: the change against stock with its 95% half-width, "≈" if inside the noise."""

    def text(row: Row) -> str:
        value, error = row.get(f"{key}_change"), row.get(f"{key}_change_error")
        if value is None or error is None:
            return "-"
        half = metrics.Z95 * error
        return f"{format(factor * value, '+' + form)} ± {format(factor * half, form)}" + (
            " ≈" if abs(value) <= half else ""
        )

    return text


def tables_of(rows: Sequence[Row], features: str | None) -> dict[str, list[Column]]:
    """Return the columns of each table by its title; a column without a figure is left out."""
    on_gpu = any(row.get("memory_per_image") is not None for row in rows)
    tables = {
        "distance to real pictures": [
            Column("images", figure("images", "d")),
            Column(distance_name(features), figure("frechet", ".2f")),
            Column("Fréchet change", change("frechet", ".2f")),
            Column("kernel x1000 ± s.e.", _kernel),
            Column("kernel change", change("kernel", ".2f", 1e3)),
        ],
        "prompt and fidelity": [
            Column("right, seen", figure("right_seen", ".1%")),
            Column("seen change", change("right_seen", ".1%")),
            Column("right, held out", figure("right_heldout", ".1%")),
            Column("held-out change", change("right_heldout", ".1%")),
            Column("CLIP score", figure("clip", ".2f")),
            Column("CLIP change", change("clip", ".2f")),
            Column("PSNR, dB", figure("psnr", ".2f")),
            Column("SSIM", figure("ssim", ".3f")),
            Column("feature distance", figure("feature_distance", ".4f")),
        ],
        "cost": [
            Column("attention", figure("backend", "")),
            Column("s/img", figure("seconds", ".3f")),
            Column("CPU s/img", figure("cpu_seconds", ".3f")),
            Column(f"speed-up ({'wall' if on_gpu else 'CPU'} time)", figure("speedup", ".2f")),
            Column("GMACs/img", _giga),
            Column("GB/img", figure("memory_per_image", ".2f", "n/a")),
        ],
    }
    first = Column("method", row_label)
    filled = {
        title: [c for c in columns if any(c.text(r) != "-" for r in rows)]
        for title, columns in tables.items()
    }
    return {title: [first, *columns] for title, columns in filled.items() if len(columns) > 0}


def _giga(row: Row) -> str:
    return "-" if row.get("multiply_adds") is None else f"{row['multiply_adds'] / 1e9:.1f}"


def _kernel(row: Row) -> str:
    if row.get("kernel") is None:
        return "-"
    return f"{1e3 * row['kernel']:.2f} ± {1e3 * row['kernel_error']:.2f}"


NOTE = (
    "change: against stock, same seeds, ± half of a 95% interval; ≈ marks a change inside the noise. "
    "Speed-ups are against stock with the attention named in the row."
)


def plan(rows: Sequence[Row]) -> str | None:
    """Return how many pictures a row needs to show a 2% difference in distance, judged by these rows."""
    needed = [row["pictures_for_2_percent"] for row in rows if row.get("pictures_for_2_percent")]
    if not needed:
        return None
    return f"A 2% difference in Fréchet distance shows at 95% from about {max(needed)} pictures a row on."
