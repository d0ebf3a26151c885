"""Table 10: pictures of every method, then a row of quality and cost for each."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from rich.console import Console

from agentsd.calibration.cost import macs

from ..cost.memory import PipelineMemory, growth
from ..pages import rows as results
from ..pages.frontier import draw_frontier, has_frontier
from ..pages.maker import describe_maker, describe_run
from ..pages.output import check_writable, progress, write_bytes
from ..pages.quality_table import note, plan, tables_of
from ..pages.rows import Row
from ..pictures.generate import Share, fingerprint, generate
from ..pictures.methods import Method, check_schedulers, expand
from ..pictures.models import find_device, load_pipeline
from ..pictures.prompts import Picture, note_unknown_words, pictures_of
from ..pictures.sampling import Seconds, sample, size_of
from ..pictures.store import Entry, Store
from ..quality.features import check_network
from ..quality.gain import gain
from ..quality.judge import Compared, Harm, Judge
from ..quality.metrics import KernelDistance
from ..quality.real import load_real
from ..settings import RunSettings
from .preflight import check_disk, check_memory, check_settings, measure_memory

OTHERS = 1_000_000
"""What the seeds and numbers of baseline's other pictures are ahead by."""


def command(settings: RunSettings, console: Console) -> None:
    """Print the tables of every method at every ratio (Table 10), and write them."""
    show(settings, table_methods(settings), "table", console)


def table_methods(settings: RunSettings) -> list[Method]:
    """Return the rows of Table 10: baseline, also in fewer steps, then every method at every ratio."""
    return expand(settings.methods, settings.ratios, settings, settings.fewer_steps)


def show(settings: RunSettings, methods: list[Method], name: str, console: Console) -> list[Row]:
    """Run, print what came out, and return the rows; none in a process that only helps another."""
    rows = run(settings, methods, name, console)
    if not rows:
        return rows
    for title, columns in tables_of(rows, settings.features).items():
        console.print(results.to_terminal(title, rows, columns))
    console.print(note(settings.features))
    if advice := plan(rows):
        console.print(advice)
    if settings.limit is not None:
        console.print(forecast(rows, settings))
    console.print(f"figures: {settings.out}", soft_wrap=True)
    return rows


def forecast(rows: Sequence[Row], settings: RunSettings) -> str:
    """Return what a trial says of the whole run: its images, and the hours that they take at these speeds."""
    whole = len(pictures_of(settings.model_copy(update={"limit": None})))
    timed = [row["seconds"] for row in rows if row.get("seconds") is not None]
    return (
        f"A trial of {rows[0]['images']} images a row, whose figures mean nothing. The whole run, without "
        f"--limit: {whole:,} images a row, {whole * len(timed):,} in all; about "
        f"{whole * sum(timed) / 3600:,.1f} h to make them at these speeds on one such device."
    )


def plot_title(settings: RunSettings, rows: Sequence[Row]) -> str:
    """Return what a run's plot is of; classes may give another number of images than the settings' own."""
    run = f"{settings.model}, {settings.steps} steps ({settings.scheduler})"
    return f"{run}, {rows[0]['images']} images a row"


LEADING = ("method", "ratio", "fd", "seconds", "memory_per_image")
"""The columns of the paper's table, which come first in every file."""


@dataclass(frozen=True)
class Measured:
    """A row for each method, a row for each method and picture, and KIDs by the rows' keys."""

    rows: list[Row]
    singles: list[Row]
    kernels: dict[str, KernelDistance]
    run: Row


def run(settings: RunSettings, methods: list[Method], name: str, console: Console) -> list[Row]:
    """Make what pictures are missing, judge them all, write `name` and `name`-pictures, return the rows."""
    found = measure(settings, methods, name, console)
    if found is None:
        return []
    tables = list(tables_of(found.rows, settings.features).values())
    results.write_rows(settings.out, name, found.rows, tables, found.run, note(settings.features))
    results.write_singles(settings.out / f"{name}-pictures.csv", found.singles)
    if has_frontier(found.rows):
        write_bytes(settings.out / f"{name}.png", draw_frontier(found.rows, plot_title(settings, found.rows)))
    return found.rows


def measure(
    settings: RunSettings,
    methods: list[Method],
    name: str,
    console: Console,
    harms: Mapping[str, Harm] | None = None,
    costs: bool = True,
) -> Measured | None:
    """Make what pictures are missing, and judge them all; `harms` are done to baseline's pictures as well.

    `costs` says whether the rows have what their methods cost, and what they are worth.

    Under `accelerate launch` the processes share the batches; the first one judges and writes, and the
    others return None. Everything that can be wrong is looked at before the first picture.
    """
    state, settings = _process(settings)
    check_settings(settings)
    check_network(settings.features, settings.inception_weights)
    check_writable(settings.out / f"{name}.jsonl")
    pictures = pictures_of(settings)
    pipe = load_pipeline(settings)
    check_schedulers(methods, pipe.scheduler, settings.steps)
    if state.is_main_process:
        note_unknown_words(pipe, pictures, settings, console)
    height, width = size_of(pipe, settings)
    real = load_real(settings, height, width)
    judge = Judge(settings, pictures, real, pipe.unet.device)
    store = Store(settings.out, state.process_index)
    with state.main_process_first():
        store.claim(fingerprint(pipe, pictures, settings), describe_maker(pipe.unet.device))
    share = Share(state.process_index, state.num_processes)
    compared = compared_of(methods[0], pictures, settings)
    made = [*methods, compared.reference] if compared.reference else methods
    check_disk(store, made, len(pictures), height, width)
    check_memory(len(pictures), 3 if compared.reference else 2)
    rows = [identity(method) for method in methods]
    with progress(console, disable=not state.is_main_process) as bars:
        if state.is_main_process and costs:
            task = bars.add_task("memory and MACs", total=len(methods))
            for method, row in zip(methods, rows, strict=True):
                row |= _cost_of_an_image(pipe, method, pictures, settings)
                bars.advance(task)
        if state.is_main_process and real is not None:
            task = bars.add_task("real pictures", total=len(real.pictures))
            judge.read_real(partial(bars.advance, task))
        count = len(pictures) * len(made) + len(compared.others)
        task = bars.add_task("pictures", total=-(-count // share.world))
        for what, of in ((made, pictures), ([compared.baseline], compared.others)):
            generate(pipe, store, what, of, settings, share, partial(bars.advance, task))
        state.wait_for_everyone()
        if not state.is_main_process:
            return None
        task = bars.add_task("features", total=len(pictures) * len(methods))
        judged, singles = judge.judge(store, methods, compared, partial(bars.advance, task), harms or {})
    if costs:
        for row, times in zip(rows, _times(store, methods, pipe.unet.device), strict=True):
            row |= times
    rows = _finished(rows, judged, harms or {}, judge.floor(), settings.features)
    if costs:
        add_gain(rows[: len(methods)], singles, settings.bootstrap)
    return Measured(rows, singles, judge.kernels, describe_run(settings, pipe.unet.device))


def _process(settings: RunSettings) -> tuple[PartialState, RunSettings]:
    """Return which of the processes this is, and the settings with its own device."""
    state = PartialState(cpu=find_device(settings.device).type == "cpu", timeout=timedelta(days=7))
    if state.num_processes > 1 and state.device.type == "cuda":
        settings = settings.model_copy(update={"device": str(state.device)})
    return state, settings


def _finished(
    rows: Sequence[Row], judged: Sequence[Row], harms: Iterable[str], floor: Row | None, features: str
) -> list[Row]:
    """Return the rows of methods, of harms and of real images, with the paper's columns first."""
    worse = [{"method": harm, "ratio": None, "backend": None, "key": harm, "label": harm} for harm in harms]
    every = [row | quality for row, quality in zip([*rows, *worse], judged, strict=True)]
    every += [floor] if floor else []
    return [{key: row.get(key) for key in LEADING} | {"features": features} | row for row in every]


def compared_of(baseline: Method, pictures: Sequence[Picture], settings: RunSettings) -> Compared:
    """Return what rows are compared with; other seeds begin where no picture's own can be."""
    reference = settings.reference_steps and replace(baseline, steps=settings.reference_steps)
    others = [
        replace(picture, index=picture.index + OTHERS, seed=picture.seed + OTHERS)
        for picture in pictures
        if settings.other_seeds
    ]
    return Compared(baseline, reference or None, others)


def add_gain(rows: Sequence[Row], singles: Sequence[Row], resamples: int) -> None:
    """Add to each row what fewer steps of the same sampler would cost at its distance, over its own cost.

    By the distance to reference images where there are any, else to the baseline's; by time and by MACs.
    """
    distance = (
        "reference_distance"
        if any(single["reference_distance"] is not None for single in singles)
        else "baseline_distance"
    )
    found: dict[str, list[float]] = {}
    for single in singles:
        found.setdefault(single["method"], []).append(single[distance])
    curve = [row for row in rows if row["method"].partition("@")[0] == "baseline"]
    curve = [row for row in curve if None not in found[row["key"]]]
    if len(curve) < 2:
        return
    plain = [np.array(found[row["key"]]) for row in curve]
    costs = {
        "seconds": [1 / row["speedup"] if row.get("speedup") else None for row in rows],
        "macs": [row["macs"] for row in rows],
    }
    for name, of_rows in costs.items():
        of_curve = [cost for row, cost in zip(rows, of_rows, strict=True) if any(row is c for c in curve)]
        for row, cost in zip(rows, of_rows, strict=True):
            ours = found[row["key"]]
            if cost is None or None in of_curve or None in ours or any(row is c for c in curve):
                continue
            value = gain(np.array(ours), cost, plain, of_curve, resamples)
            row |= {
                f"gain_{name}": value.value,
                f"gain_{name}_low": value.low,
                f"gain_{name}_high": value.high,
                f"gain_{name}_beyond": value.beyond,
            }


def identity(method: Method) -> Row:
    """Return which method a row is of."""
    agent = ", ".join(f"{key}={value}" for key, value in method.agent)
    return {
        "method": method.name,
        "ratio": method.ratio,
        "backend": method.backend,
        "key": method.key,
        "agent": agent or None,
        "label": f"{method.label}, {agent}" if agent else method.label,
    }


def _cost_of_an_image(pipe: Any, method: Method, pictures: Sequence[Picture], settings: RunSettings) -> Row:
    """Return GB and MACs an image: what a method takes beside time, before any image is kept."""
    memory: PipelineMemory | None = measure_memory(pipe, method, pictures, settings)
    counted = min(settings.count_on, len(pictures))

    def call() -> None:
        sample(pipe, method, pictures[:counted], settings)

    return {
        "memory_per_image": None if memory is None else growth(memory.total),
        "denoising_memory": None if memory is None else growth(memory.denoising),
        "decoding_memory": None if memory is None else growth(memory.decoding),
        "macs": macs(call) // counted,
    }


def _times(store: Store, methods: Sequence[Method], device: torch.device) -> list[Row]:
    """Return seconds an image, and the speed-up against the baseline where both ran in one session."""
    baseline = store.timings(methods[0])
    rows = []
    for method in methods:
        ours = store.timings(method)
        both = [
            _charged(baseline[key], device) / _charged(ours[key], device) for key in ours if key in baseline
        ]
        rows.append(
            {
                "seconds": statistics.median(e.seconds / e.batch_images for e in ours.values()),
                "cpu_seconds": statistics.median(e.cpu_seconds / e.batch_images for e in ours.values()),
                "speedup": statistics.median(both) if both else None,
                "speedup_batches": len(both),
            }
        )
    return rows


def _charged(entry: Entry, device: torch.device) -> float:
    return Seconds(entry.seconds, entry.cpu_seconds).charged(device)
