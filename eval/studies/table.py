"""Table 10: pictures of every method, then a row of quality and cost for each."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from rich.console import Console

from agentsd.calibration.cost import macs

from ..cost.memory import memory_per_image
from ..pages import rows as results
from ..pages.frontier import draw_frontier, has_frontier
from ..pages.maker import describe_maker, describe_run
from ..pages.output import check_writable, progress, write_bytes
from ..pages.quality_table import NOTE, plan, tables_of
from ..pages.rows import Row
from ..pictures.generate import Share, fingerprint, generate
from ..pictures.methods import Method, check_scheduler, expand
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
    console.print(NOTE)
    if advice := plan(rows):
        console.print(advice)
    console.print(f"figures: {settings.out}", soft_wrap=True)
    return rows


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
    results.write_rows(settings.out, name, found.rows, tables, found.run, NOTE)
    results.write_singles(settings.out / f"{name}-pictures.csv", found.singles)
    if has_frontier(found.rows):
        title = f"{settings.model}, {settings.steps} steps ({settings.scheduler}), {settings.images} pictures"
        write_bytes(settings.out / f"{name}.png", draw_frontier(found.rows, title))
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
    state = PartialState(cpu=find_device(settings.device).type == "cpu", timeout=timedelta(days=7))
    if state.num_processes > 1 and state.device.type == "cuda":
        settings = settings.model_copy(update={"device": str(state.device)})
    check_network(settings.features, settings.inception_weights)
    check_writable(settings.out / f"{name}.jsonl")
    pictures = pictures_of(settings)
    pipe = load_pipeline(settings)
    for method in methods:
        check_scheduler(method, pipe.scheduler, settings.steps)
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
    with progress(console, disable=not state.is_main_process) as bars:
        if state.is_main_process and real is not None:
            first = bars.add_task("real pictures", total=len(real.pictures))
            judge.read_real(lambda n: bars.advance(first, n))
        made = [*methods, compared.reference] if compared.reference else methods
        count = len(pictures) * len(made) + len(compared.others)
        task = bars.add_task("pictures", total=-(-count // share.world))
        generate(pipe, store, made, pictures, settings, share, lambda n: bars.advance(task, n))
        generate(
            pipe,
            store,
            [compared.baseline],
            compared.others,
            settings,
            share,
            lambda n: bars.advance(task, n),
        )
        state.wait_for_everyone()
        if not state.is_main_process:
            return None
        task = bars.add_task("features", total=len(pictures) * len(methods))
        judged, singles = judge.judge(store, methods, compared, lambda n: bars.advance(task, n), harms or {})
    rows = [identity(method) | row for method, row in zip(methods, judged, strict=False)]
    if costs:
        for row, cost in zip(rows, _costs(pipe, store, methods, pictures, settings), strict=True):
            row |= cost
        add_gain(rows, singles, settings.bootstrap)
    for harm, row in zip(harms or {}, judged[len(methods) :], strict=True):
        rows.append({"method": harm, "ratio": None, "backend": None, "key": harm, "label": harm} | row)
    if floor := judge.floor():
        rows.append(floor)
    return Measured(rows, singles, judge.kernels, describe_run(settings, pipe.unet.device))


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


def _costs(
    pipe: Any, store: Store, methods: Sequence[Method], pictures: Sequence[Picture], settings: RunSettings
) -> list[Row]:
    """Return seconds a picture, speed-up against the baseline where both ran in one session, and GB a
    picture."""
    device = pipe.unet.device
    baseline = store.timings(methods[0])
    rows = []
    for method in methods:
        ours = store.timings(method)
        both = [
            _charged(baseline[key], device) / _charged(ours[key], device) for key in ours if key in baseline
        ]

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
                "macs": macs(partial(call, counted)) // counted,
            }
        )
    return rows


def _charged(entry: Entry, device: torch.device) -> float:
    return Seconds(entry.seconds, entry.cpu_seconds).charged(device)
