"""Table 10: images of every method, then a row of quality and cost for each."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import cache, partial
from itertools import chain, product
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from rich.console import Console

from agentsd.progress import progress

from .. import run_file
from ..cost.macs import macs
from ..cost.memory import growth
from ..environment import describe_environment
from ..files import check_writable, write_bytes
from ..images.generate import Share, fingerprint, generate
from ..images.methods import Method, check_schedulers, expand
from ..images.models import find_device, load_pipeline, offload, scheduler_like
from ..images.prompts import ImageSpec, note_too_few, note_unknown_words, specs_of
from ..images.sampling import sample, size_of
from ..images.store import Store, times_of
from ..intervals import captions_of
from ..pages import rows as results
from ..pages.plots import plot_bytes, plot_of
from ..pages.quality_table import disturbed, note, tables_of, verdict
from ..pages.rows import Row, distance_name, is_baseline
from ..quality.gain import Line, gain
from ..quality.measure import Judge, Shown, row_of
from ..quality.real import load_real
from ..settings import RunSettings
from .preflight import check_disk, check_memory, check_settings, forecast, measure_memory


def table_methods(settings: RunSettings) -> list[Method]:
    """Return the rows of Table 10: baseline, also in fewer steps, then every method at every ratio."""
    shares, samplers = settings.fewer_steps, settings.samplers
    return expand(settings.methods, settings.ratios, settings, shares, samplers)


def command(settings: RunSettings, console: Console) -> None:
    """Print what gains, and the tables of every method at every ratio (Table 10), and write them."""
    rows = run(settings, table_methods(settings), "table", console)
    if not rows:  # in a process that only helps another
        return
    console.print(verdict(rows), markup=False)
    clock = run_file.read(settings.out)["results"]["table"]["clock"]
    tables = tables_of(rows, settings.model_dump(), clock)
    results.show(console, rows, tables, remarks(settings, rows), settings.out)


def remarks(settings: RunSettings, rows: Sequence[Row]) -> str:
    """Return what stands below the tables."""
    told = note(settings.features), Store(settings.out).mixture(rows), disturbed(rows)
    return "\n\n".join(filter(None, told))


LEADING = ("method", "ratio", "fd", "seconds", "memory_per_image")
"""The columns of the paper's table, which come first in every file."""


@dataclass(frozen=True)
class Made:
    """A run whose images are made, and what they are measured beside."""

    asked: Sequence[ImageSpec]
    device: torch.device
    store: Store
    judge: Judge
    costs: list[Row]
    """What an image of each method costs beside time, if that was measured."""

    def shown(self, method: Method) -> Shown:
        """Return a method's images."""
        if method.is_baseline and self.judge.baseline is not None:
            return self.judge.baseline
        paths = [self.store.path(method, spec.index) for spec in self.asked]
        return Shown(method.key, paths, self.judge)


def run(settings: RunSettings, methods: list[Method], name: str, console: Console) -> list[Row]:
    """Make what images are missing, measure them all, write `name` and `name`-images, return the rows."""
    made = make(settings, methods, name, console)
    if made is None:
        return []
    rows, singles, baseline = [], [], None
    taken = times_of([made.store.timings(method) for method in methods], made.device)
    with progress(console) as bars:
        for method, cost, times in bars.track(
            list(zip(methods, made.costs, taken, strict=True)), description="metrics"
        ):
            measured = made.judge.measure(made.shown(method), made.asked)
            baseline = baseline or measured
            row = identity(method) | cost | times | row_of(measured, baseline)
            rows.append(row | made.store.makers(method))
            singles += measured.singles
    add_gain(rows, singles)
    if floor := made.judge.floor(len(made.asked)):
        rows.append(floor)
    rows = [{key: row.get(key) for key in LEADING} | {"features": settings.features} | row for row in rows]
    facts = made.store.describe(settings, rows)
    tables = tables_of(rows, settings.model_dump(), facts["clock"])
    results.write_rows(settings.out, name, rows, tables, facts, remarks(settings, rows))
    results.write_singles(settings.out / f"{name}-images.csv", singles)
    title = f"{settings.model}, {settings.steps} steps ({settings.scheduler}), {len(made.asked)} images a row"
    plot = plot_of(rows, title, distance_name(settings.features, settings.model == "demo"))
    if plot is not None:
        write_bytes(settings.out / f"{name}.png", plot_bytes(plot))
    return rows


def make(
    settings: RunSettings, methods: list[Method], name: str, console: Console, costs: bool = True
) -> Made | None:
    """Make what images are missing, and read real ones; `costs` says whether memory and MACs are measured.

    Under `accelerate launch` the processes share the batches; the first one measures and writes, and for the
    others this returns None. Everything that can be wrong is looked at before the first image.
    """
    state, settings = _process(settings)
    check_settings(settings)
    check_writable(settings.out / f"{name}.jsonl")
    asked = specs_of(settings)
    pipe, device = load_pipeline(settings), find_device(settings.device)
    check_schedulers(methods, pipe.scheduler, settings.steps)
    aside = Console(stderr=True)  # so that what comes out is the verdict and the tables
    if state.is_main_process:
        note_unknown_words(pipe, asked, settings, aside)
        note_too_few(asked, aside)
    height, width = size_of(pipe, settings)
    real = load_real(settings, height, width)
    judge = Judge(settings, device)
    store = Store(settings.out, state.process_index)
    with state.main_process_first():
        store.claim(fingerprint(pipe, asked, settings), describe_environment(device))
        known = run_file.read(settings.out).get("costs", {})
    offload(pipe, settings)  # of weights that are elsewhere there is no fingerprint
    share = Share(state.process_index, state.num_processes)
    reference = replace(methods[0], steps=settings.reference_steps) if settings.reference_steps else None
    made = [*methods, reference] if reference else methods
    check_disk(store, made, len(asked), height, width)
    check_memory(len(asked), 3 if reference else 2)
    if state.is_main_process and (told := forecast(pipe, store, made, asked, settings)):
        aside.print(told, markup=False, soft_wrap=True)
    taken: list[Row] = [{} for _ in methods]
    with progress(console, disable=not state.is_main_process) as bars:
        if state.is_main_process and real is not None:  # first: one of them may be broken
            task = bars.add_task("real images", total=len(real.images))
            judge.read_real(real, partial(bars.advance, task))
        if state.is_main_process and costs:
            task = bars.add_task("memory and MACs", total=len(methods))
            plain = plain_macs(pipe, asked, settings)
            for method, row in zip(methods, taken, strict=True):
                name = f"{method.key}, batch {settings.batch_size}, maker {store.maker}"
                row |= known.get(name) or _cost_of_an_image(pipe, method, asked, settings, plain)
                row["costed_by"] = store.maker
                run_file.update(settings.out, costs={name: row})
                bars.advance(task)
        task = bars.add_task("images", total=-(-len(asked) * len(made) // share.world))
        generate(pipe, store, made, asked, settings, share, partial(bars.advance, task))
        state.wait_for_everyone()
    if not state.is_main_process:
        return None
    found = Made(asked, device, store, judge, taken)
    judge.baseline = found.shown(methods[0])
    judge.reference = found.shown(reference) if reference else None
    return found


def _process(settings: RunSettings) -> tuple[PartialState, RunSettings]:
    """Return which of the processes this is, and the settings with its own device."""
    state = PartialState(cpu=find_device(settings.device).type == "cpu", timeout=timedelta(days=7))
    if state.num_processes > 1 and state.device.type == "cuda":
        settings = settings.model_copy(update={"device": str(state.device)})
    return state, settings


def add_gain(rows: Sequence[Row], singles: Sequence[Row]) -> None:
    """Add to each row what the plain model in fewer steps would cost at its distance, over its own cost.

    `gain` is against fewer steps of the row's own sampler, `gain_best` against the cheapest of all plain
    samplers' lines, where there are several. By the distance to reference images where there are any, else to
    the baseline's; by time and by MACs.
    """
    to_reference = any(single["reference_distance"] is not None for single in singles)
    name = "reference_distance" if to_reference else "baseline_distance"
    of_row = {row["key"]: [one for one in singles if one["method"] == row["key"]] for row in rows}
    found = {key: [one[name] for one in ours] for key, ours in of_row.items()}
    measured = [row for row in rows if None not in found[row["key"]]]
    plain = [row for row in measured if is_baseline(row)]
    costs: dict[str, Callable[[Row], float | None]] = {
        "seconds": lambda row: 1 / row["speedup"] if row.get("speedup") else None,
        "macs": lambda row: row["macs"],
    }
    samplers = dict.fromkeys(row.get("sampler") for row in plain)
    for row, (by, cost_of) in product(measured, costs.items()):
        own = [] if is_baseline(row) else [row.get("sampler")]
        for kind, of in (("gain", own), ("gain_best", list(samplers) if len(samplers) > 1 else [])):
            points = [[one for one in plain if one.get("sampler") == sampler] for sampler in of]
            prices = [[cost_of(one) for one in line] for line in points]
            cost = cost_of(row)
            if sum(map(len, points)) < 2 or cost is None or None in chain(*prices):
                continue
            lines = [
                Line(np.array(price), np.array([found[one["key"]] for one in line]))
                for line, price in zip(points, prices, strict=True)
            ]
            figures = asdict(gain(np.array(found[row["key"]]), cost, lines, captions_of(of_row[row["key"]])))
            row[f"{kind}_{by}"] = figures.pop("value")
            row |= {f"{kind}_{by}_{key}": figure for key, figure in figures.items()}


def identity(method: Method) -> Row:
    """Return which method a row is of."""
    return {
        "method": method.name,
        "ratio": method.ratio,
        "backend": method.backend,
        "sampler": method.scheduler,
        "key": method.key,
        "label": method.label,
    }


def plain_macs(pipe: Any, specs: Sequence[ImageSpec], settings: RunSettings) -> Callable[[Method], int]:
    """Return what gives a plain row's MACs: those of a call of the U-Net times its calls, and those beside.

    They are counted in two short runs, when first asked for.
    """

    @cache
    def count(steps: int) -> tuple[int, int]:
        run = Method((), backend=settings.backend, steps=steps)
        return calls_of(pipe, run, settings), macs(lambda: sample(pipe, run, specs[:1], settings))

    def of(method: Method) -> int:
        (few, beside), (more, total) = count(2), count(3)
        return beside + (total - beside) * (calls_of(pipe, method, settings) - few) // (more - few)

    return of


def calls_of(pipe: Any, method: Method, settings: RunSettings) -> int:
    """Return how often a plain row calls the U-Net: PLMS once more than it has steps."""
    scheduler = scheduler_like(pipe.scheduler, method.scheduler or "model")
    scheduler.set_timesteps(method.steps or settings.steps)
    return len(scheduler.timesteps)


def _cost_of_an_image(
    pipe: Any,
    method: Method,
    specs: Sequence[ImageSpec],
    settings: RunSettings,
    plain: Callable[[Method], int],
) -> Row:
    """Return GB and MACs an image: what a method takes beside time, before any image is kept."""
    memory = measure_memory(pipe, method, specs, settings)
    return {
        "memory_per_image": memory and growth(memory.total),
        "denoising_memory": memory and growth(memory.denoising),
        "decoding_memory": memory and growth(memory.decoding),
        "macs": macs(lambda: sample(pipe, method, specs[:1], settings)) if method.parts else plain(method),
    }
