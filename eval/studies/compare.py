"""Same-seed images of several methods side by side (Fig. 6); their times and differences are printed."""

import math
import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from PIL import Image
from rich.console import Console

from agentsd.progress import progress

from ..files import check_own_image, check_writable, save_image
from ..images.methods import Method, check_schedulers, expand, fewer
from ..images.models import load_pipeline
from ..images.prompts import ImageSpec, note_unknown_words, specs_to_show
from ..images.sampling import Seconds, sample, warm_up
from ..pages.grid import STRONGER, difference, draw_grid
from ..pages.rows import Column, Row, figure, to_terminal
from ..quality import fidelity
from ..settings import CompareSettings


def command(settings: CompareSettings, console: Console) -> None:
    """Draw the images, print their figures."""
    methods = methods_of(settings)
    check_writable(settings.out)
    check_own_image(settings.out)
    specs = specs_to_show(settings)
    pipe = load_pipeline(settings)
    check_schedulers(methods, pipe.scheduler, settings.steps)
    note_unknown_words(pipe, specs, settings, console)
    with progress(console) as bars:
        task = bars.add_task("images", total=len(methods) * (len(specs) + 1))
        images, rows = compare(pipe, methods, specs, settings, lambda: bars.advance(task))
    labels = [title_of(method, settings) for method in methods]
    seeds = [f"{spec.prompt}\nseed {spec.seed}" for spec in specs]
    if settings.differences:
        images, labels = with_differences(images, labels)
    save_image(draw_grid(images, labels, seeds), settings.out)
    device = pipe.unet.device
    run = f"{settings.model}, {settings.steps} steps ({settings.scheduler})"
    title = f"{run}, {settings.backend} attention, {device}"
    console.print(to_terminal(title, rows, columns_of("CPU" if device.type == "cpu" else "wall")))
    for row in rows:
        if row["calls"] is not None:
            console.print(f"{row['label']}, each call: {row['calls']}", markup=False)
    console.print(f"images: {settings.out}", soft_wrap=True)


def methods_of(settings: CompareSettings) -> list[Method]:
    """Return the baseline, then what is free, fewer steps under the other samplers, then the methods."""
    fewer_steps = fewer(settings.fewer_steps, settings)
    plain = [replace(row, scheduler=name) for name in settings.samplers for row in fewer_steps]
    baseline, *others = expand(settings.methods, [settings.ratio], settings)
    return list(dict.fromkeys([baseline, *(plain or fewer_steps), *others]))


def compare(
    pipe: Any,
    methods: list[Method],
    specs: list[ImageSpec],
    settings: CompareSettings,
    report: Callable[[], None],
) -> tuple[list[list[Image.Image]], list[Row]]:
    """Make every image with every method, one at a time, the methods taking turns (A B C A B C).

    Returns each method's images in the order of the prompts, and a row of its figures against the first
    method: medians of the times, means over the images of the others. `report` is called after each image
    and each method's warm-up.
    """
    for method in methods:
        warm_up(pipe, method, specs[:1], settings)
        report()
    images: dict[Method, list[Image.Image]] = {method: [] for method in methods}
    seconds: dict[Method, list[Seconds]] = {method: [] for method in methods}
    summaries: dict[Method, str] = {}
    for spec in specs:
        for method in methods:
            made, taken = sample(pipe, method, [spec], settings, partial(summaries.__setitem__, method))
            images[method] += made
            seconds[method].append(taken)
            report()
    device, baseline, rows = pipe.unet.device, methods[0], []
    for method in methods:
        pairs = list(zip(images[method], images[baseline], strict=True))
        times = zip(seconds[baseline], seconds[method], strict=True)
        rows.append(
            {
                "label": method.label,
                "seconds": statistics.median(taken.wall for taken in seconds[method]),
                "cpu_seconds": statistics.median(taken.cpu for taken in seconds[method]),
                "speedup": statistics.median(a.charged(device) / b.charged(device) for a, b in times),
                "psnr": statistics.mean(fidelity.psnr(*pair) for pair in pairs),
                "mean_abs": statistics.mean(fidelity.mean_abs(*pair) for pair in pairs),
                "calls": summaries.get(method),
            }
        )
    return list(images.values()), rows


def title_of(method: Method, settings: CompareSettings) -> str:
    """Return what stands beside a row of images; the times, which are this machine's, are printed."""
    if method.parts:
        return method.label
    kind = "baseline" if method.is_baseline else "plain"
    sampler = (method.scheduler or settings.scheduler).removesuffix("karras")
    return f"{kind},\n{method.steps or settings.steps} steps, {sampler}"


def with_differences(
    images: list[list[Image.Image]], labels: list[str]
) -> tuple[list[list[Image.Image]], list[str]]:
    """Return the rows and their labels with a row below each but the first: where it differs from that."""
    shown, names = [images[0]], [labels[0]]
    for row, label in zip(images[1:], labels[1:], strict=True):
        shown += [row, list(map(difference, row, images[0]))]
        names += [label, f"difference to\nthe first row, x {STRONGER}"]
    return shown, names


def columns_of(clock: str) -> list[Column]:
    """Return the columns of the table; `clock` ("wall" or "CPU") is what speed-ups are computed from."""
    return [
        Column("method", figure("label", "")),
        Column("s/image", figure("seconds", ".3f")),
        Column("CPU s/image", figure("cpu_seconds", ".3f")),
        Column(f"speed-up ({clock} time)", lambda row: f"{row['speedup']:.2f}x"),
        Column("PSNR, dB", lambda row: "equal" if row["psnr"] == math.inf else f"{row['psnr']:.1f}"),
        Column("mean abs. diff, levels of 255", figure("mean_abs", ".2f")),
    ]
