"""Validation of the metrics: degradations of known order are put in that order, beyond their errors."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any
from zlib import crc32

import numpy as np
from PIL import Image, ImageFilter
from rich.console import Console

from ..errors import EvalError
from ..images.methods import Method, parse_method
from ..intervals import FEWEST, captions_of, half, interval
from ..pages import rows as results
from ..pages.rows import Column, Row
from ..quality.features import open_image
from ..quality.measure import Measured, Shown
from ..quality.metrics import KernelDistance
from ..studies.table import make
from .settings import ValidationSettings

BLURS, NOISES = (0.5, 1.0, 2.0), (4, 10, 25)
RATIOS = (0.25, 0.5, 0.75)
INTERVALS = (2, 3, 5, 10)
NOTE = (
    "Each pair names a smaller and a greater degradation. Of perceptual distances the ratio of the greater "
    "one's to the smaller one's, a geometric mean over the same seeds; of KIDs (x1000) their difference; "
    "with a 95% interval. Seen: the interval lies on the right side."
)


def command(settings: ValidationSettings, console: Console) -> None:
    """Print the ordered pairs, and write them."""
    methods, chains = methods_of(settings)
    made = make(settings, methods, "metric-validation", console, costs=False)
    if made is None:
        return
    if made.judge.reference is None:
        raise EvalError("metric-validation: give --reference-steps")
    shown = [made.shown(method) for method in methods]
    for name, degradation in DEGRADATIONS.items():
        shown.append(Shown(name, [degradation(open_image(image)) for image in shown[0].images], made.judge))
    found = {one.key: made.judge.measure(one, made.asked) for one in shown}
    pairs = pairs_of(found, chains | DEGRADED)
    facts = made.store.describe(settings, [made.store.makers(method) for method in methods])
    tables = {f"what the metrics see, {len(made.asked)} images a row": COLUMNS}
    results.write_rows(settings.out, "metric-validation", pairs, tables, facts, NOTE)
    singles = [single for measured in found.values() for single in measured.singles]
    results.write_singles(settings.out / "metric-validation-images.csv", singles)
    results.show(console, pairs, tables, NOTE, settings.out)


def methods_of(settings: ValidationSettings) -> tuple[list[Method], dict[str, list[str]]]:
    """Return every method that is run, baseline first, and the chains of their keys, from least to most
    degradation."""
    baseline = parse_method("baseline", None, settings)
    chains = {
        "steps": [
            baseline if count == settings.steps else parse_method(f"baseline@{count}", None, settings)
            for count in settings.chain_steps
        ],
        "tomesd": [parse_method("tomesd", ratio, settings) for ratio in RATIOS],
        "DeepCache": [parse_method(f"deepcache-{interval}", None, settings) for interval in INTERVALS],
    }
    methods = dict.fromkeys([baseline, *(method for chain in chains.values() for method in chain)])
    return list(methods), {name: [method.key for method in chain] for name, chain in chains.items()}


def blur(radius: float, image: Image.Image) -> Image.Image:
    """Return the image under a Gaussian of this radius, in pixels."""
    return image.filter(ImageFilter.GaussianBlur(radius))


def noise(sigma: float, image: Image.Image) -> Image.Image:
    """Return the image with white noise of its own, of this standard deviation in levels of 0..255."""
    added = np.random.default_rng(crc32(image.tobytes())).normal(0, sigma, (image.height, image.width, 3))
    return Image.fromarray((np.asarray(image) + added).round().clip(0, 255).astype(np.uint8))


_DEGRADATIONS: dict[str, tuple[Callable[..., Image.Image], Sequence[float]]] = {
    "blur": (blur, BLURS),
    "noise": (noise, NOISES),
}
DEGRADATIONS: Mapping[str, Callable[[Image.Image], Image.Image]] = {
    f"{name} {strength:g}": partial(degradation, strength)
    for name, (degradation, strengths) in _DEGRADATIONS.items()
    for strength in strengths
}
DEGRADED = {name: [f"{name} {strength:g}" for strength in s] for name, (_, s) in _DEGRADATIONS.items()}


@dataclass(frozen=True)
class Pair:
    """The measure of a greater degradation beside a smaller one's: its value, and a 95% interval or None."""

    value: float
    low: float | None
    high: float | None
    none: float
    """What it is without any: a ratio of 1, a difference of 0."""

    @property
    def verdict(self) -> str:
        """Whether the degradation is seen."""
        if self.low is None or self.high is None:
            return f"fewer than {FEWEST} images"
        if self.low > self.none:
            return "seen"
        return "out of order" if self.high < self.none else "not told apart"


def ratio(less: Sequence[float], more: Sequence[float], captions: Sequence[str] = ()) -> Pair:
    """Return the ratio of two degradations' perceptual distances, paired by seed."""
    logs = np.log(np.maximum(more, 1e-12)) - np.log(np.maximum(less, 1e-12))
    ends = interval(lambda counts: np.exp(counts @ logs / counts.sum(1)), captions or range(len(logs)))
    low, high = ends or (None, None)
    return Pair(float(np.exp(logs.mean())), low, high, none=1.0)


def difference(less: KernelDistance, more: KernelDistance) -> Pair:
    """Return the difference of two degradations' KIDs x1000, paired by seed."""
    middle, units = 1e3 * (more.value - less.value), len(set(more.captions or more.without_generated))
    if units < FEWEST:
        return Pair(middle, None, None, none=0.0)
    wide = 1e3 * half(more.difference_error(less), units)
    return Pair(middle, middle - wide, middle + wide, none=0.0)


def pairs_of(found: Mapping[str, Measured], chains: Mapping[str, Sequence[str]]) -> list[Row]:
    """Return a row for each pair of neighbours in a chain, by each metric that both have."""
    rows = []
    for chain, keys in chains.items():
        for less, more in pairwise(keys):
            pairs: dict[str, Pair] = {}
            for name, key in (
                ("to reference image", "reference_distance"),
                ("to the baseline", "baseline_distance"),
            ):
                values: Any = [[single[key] for single in found[one].singles] for one in (less, more)]
                if None not in values[0] + values[1] and (chain, key) != ("steps", "baseline_distance"):
                    pairs[name] = ratio(values[0], values[1], captions_of(found[more].singles))
            smaller, greater = found[less].kid, found[more].kid
            if smaller and greater:
                pairs["kid"] = difference(smaller, greater)
            for name, pair in pairs.items():
                values_of: Row = {
                    "value": pair.value,
                    "low": pair.low,
                    "high": pair.high,
                    "verdict": pair.verdict,
                }
                rows.append({"chain": chain, "less": less, "more": more, "measure": name} | values_of)
    return rows


def _pair_of(row: Row) -> str:
    return f"{row['less'].removesuffix('-sdpa')} < {row['more'].removesuffix('-sdpa')}"


def _interval(row: Row) -> str:
    ends = "" if row["low"] is None else f" ({row['low']:.3g} to {row['high']:.3g})"
    return f"{row['value']:.3g}{ends}"


COLUMNS = [
    Column("smaller < greater degradation", _pair_of),
    Column("measure", lambda row: row["measure"]),
    Column("greater / smaller, or difference", _interval),
    Column("", lambda row: row["verdict"]),
]
