"""Same-seed images of several methods side by side (Fig. 6), with their times and differences."""

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from PIL import Image
from rich.console import Console
from rich.table import Table

from ..files import check_writable, save_image
from ..images.methods import Method, check_schedulers, expand
from ..images.models import load_pipeline
from ..images.prompts import ImageSpec, note_unknown_words, specs_to_show
from ..images.sampling import Seconds, sample, warm_up
from ..pages.grid import draw_grid
from ..pages.output import make_table, progress
from ..quality import fidelity
from ..settings import CompareSettings


@dataclass(frozen=True)
class Comparison:
    """One method of a comparison: its images in prompt order, and figures against the baseline."""

    method: Method
    images: list[Image.Image]
    seconds: list[Seconds]
    speedup: float
    """Median over the prompts of the baseline's processor time over this method's (wall time on a GPU)."""
    psnr: float
    """Mean over the prompts, dB."""
    mean_abs: float
    """Mean over the prompts, levels of 0..255."""
    calls: str | None = None
    """What each call of the last run was, where a recipe was in force."""

    @property
    def seconds_per_image(self) -> float:
        """The median wall-clock time of an image."""
        return statistics.median(seconds.wall for seconds in self.seconds)


def command(settings: CompareSettings, console: Console) -> None:
    """Draw the images, print their figures."""
    methods = methods_of(settings)
    check_writable(settings.out)
    pipe = load_pipeline(settings)
    specs = specs_to_show(settings)
    note_unknown_words(pipe, specs, settings, console)
    with progress(console) as bars:
        task = bars.add_task("images", total=len(methods) * (len(specs) + 1))
        comparisons = compare(pipe, methods, specs, settings, lambda: bars.advance(task))
    save_image(draw(comparisons, specs), settings.out)
    console.print(summary(comparisons, settings, pipe.unet.device))
    for comparison in comparisons:
        if comparison.calls is not None:
            console.print(f"{comparison.method.label}, each call: {comparison.calls}", markup=False)
    console.print(f"images: {settings.out}", soft_wrap=True)


def methods_of(settings: CompareSettings) -> list[Method]:
    """Return the methods of the settings, baseline first. Raises EvalError on an unknown one."""
    return expand(settings.methods, [settings.ratio], settings, settings.fewer_steps)


def compare(
    pipe: Any,
    methods: list[Method],
    specs: list[ImageSpec],
    settings: CompareSettings,
    report: Callable[[], None],
) -> list[Comparison]:
    """Make every image with every method, one at a time, the methods taking turns (A B C A B C).

    `report` is called after each image and each method's warm-up. The first method is the one compared with.
    """
    check_schedulers(methods, pipe.scheduler, settings.steps)
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
    baseline = methods[0]
    found = [_against(baseline, method, images, seconds, pipe.unet.device) for method in methods]
    return [replace(one, calls=summaries.get(one.method)) for one in found]


def _against(
    baseline: Method,
    method: Method,
    images: dict[Method, list[Image.Image]],
    seconds: dict[Method, list[Seconds]],
    device: torch.device,
) -> Comparison:
    pairs = list(zip(images[method], images[baseline], strict=True))
    times = zip(seconds[baseline], seconds[method], strict=True)
    return Comparison(
        method=method,
        images=images[method],
        seconds=seconds[method],
        speedup=statistics.median(ours.charged(device) / own.charged(device) for ours, own in times),
        psnr=statistics.mean(fidelity.psnr(*pair) for pair in pairs),
        mean_abs=statistics.mean(fidelity.mean_abs(*pair) for pair in pairs),
    )


def draw(comparisons: list[Comparison], specs: list[ImageSpec]) -> Image.Image:
    """Return the images as one labelled image, a row for each method."""
    labels = [f"{c.method.label}\n{c.seconds_per_image:.2f} s/image\n{c.speedup:.2f}x" for c in comparisons]
    columns = [f"{spec.prompt}\nseed {spec.seed}" for spec in specs]
    return draw_grid([c.images for c in comparisons], labels, columns)


def summary(comparisons: list[Comparison], settings: CompareSettings, device: torch.device) -> Table:
    """Return the figures as a terminal table."""
    clock = "wall" if device.type == "cuda" else "CPU"
    columns = [
        "method",
        "s/image",
        "CPU s/image",
        f"speed-up ({clock} time)",
        "PSNR, dB",
        "mean abs. diff, levels of 255",
    ]
    rows = [
        [
            c.method.label,
            f"{c.seconds_per_image:.3f}",
            f"{statistics.median(s.cpu for s in c.seconds):.3f}",
            f"{c.speedup:.2f}x",
            "equal" if c.psnr == math.inf else f"{c.psnr:.1f}",
            f"{c.mean_abs:.2f}",
        ]
        for c in comparisons
    ]
    run = f"{settings.model}, {settings.steps} steps ({settings.scheduler})"
    title = f"{run}, {settings.backend} attention, {device}"
    return make_table(title, columns, rows)
