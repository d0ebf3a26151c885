"""Proof that the judge judges: losses of known order are put in that order, beyond their errors."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np
from PIL import Image, ImageFilter
from rich.console import Console

from ..errors import EvalError
from ..pages import rows as results
from ..pages.links import draw_links, pair_of
from ..pages.output import write_bytes
from ..pages.rows import Column, Row
from ..pictures.methods import Method, parse_method
from ..quality.judge import Harm
from ..quality.metrics import Z95, KernelDistance, standard_error
from ..settings import ProofSettings
from .table import Measured, measure

BLURS, NOISES = (0.5, 1.0, 2.0), (4, 10, 25)
RATIOS = (0.25, 0.5, 0.75)
INTERVALS = (2, 3, 5, 10)
NOTE = (
    "Each link names a smaller and a greater loss. Of perceptual distances the ratio of the greater one's to "
    "the smaller one's, a geometric mean over the same seeds; of KIDs (x1000) their difference; "
    "with a 95% interval. Seen: the interval lies on the right side."
)


def command(settings: ProofSettings, console: Console) -> None:
    """Print the links of every chain, and write them."""
    methods, chains = rivals(settings)
    found = measure(settings, methods, "proof", console, HARMS, costs=False)
    if found is None:
        return
    if "reference_distance" not in found.singles[0] or len(found.singles) // len(found.rows) < 2:
        raise EvalError("proof: take 2 pictures or more, and --reference-steps")
    links = links_of(found, chains | HARM_CHAINS)
    run = found.run
    results.write_rows(settings.out, "proof", links, [COLUMNS], run, NOTE)
    results.write_singles(settings.out / "proof-pictures.csv", found.singles)
    title = f"what the judge sees, {found.rows[0]['images']} pictures a row"
    write_bytes(settings.out / "proof.png", draw_links(links, title))
    console.print(results.to_terminal(title, links, COLUMNS))
    console.print(NOTE)
    console.print(f"figures: {settings.out}", soft_wrap=True)


def rivals(settings: ProofSettings) -> tuple[list[Method], dict[str, list[str]]]:
    """Return every method that is run, baseline first, and the chains of their keys, from least to most
    loss."""
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
    """Return the picture under a Gaussian of this radius, in pixels."""
    return image.filter(ImageFilter.GaussianBlur(radius))


def noise(sigma: float, image: Image.Image) -> Image.Image:
    """Return the picture with white noise of this standard deviation, in levels of 0..255."""
    added = np.random.default_rng(0).normal(0, sigma, (image.height, image.width, 3))
    return Image.fromarray((np.asarray(image) + added).round().clip(0, 255).astype(np.uint8))


_HARMS: dict[str, tuple[Callable[..., Image.Image], Sequence[float]]] = {
    "blur": (blur, BLURS),
    "noise": (noise, NOISES),
}
HARMS: Mapping[str, Harm] = {
    f"{name} {strength:g}": partial(harm, strength)
    for name, (harm, strengths) in _HARMS.items()
    for strength in strengths
}
HARM_CHAINS = {name: [f"{name} {strength:g}" for strength in s] for name, (_, s) in _HARMS.items()}


@dataclass(frozen=True)
class Link:
    """The measure of a greater loss beside a smaller one's: its value, and a 95% interval."""

    value: float
    low: float
    high: float
    none: float
    """What it is where nothing is lost: a ratio of 1, a difference of 0."""

    @property
    def verdict(self) -> str:
        """Whether the loss is seen."""
        if self.low > self.none:
            return "seen"
        return "out of order" if self.high < self.none else "not told apart"


def ratio(less: Sequence[float], more: Sequence[float]) -> Link:
    """Return the ratio of two losses' perceptual distances, paired by seed."""
    logs = np.log(np.maximum(more, 1e-12)) - np.log(np.maximum(less, 1e-12))
    middle, half = logs.mean(), Z95 * standard_error(logs)
    low, high = float(np.exp(middle - half)), float(np.exp(middle + half))
    return Link(float(np.exp(middle)), low, high, none=1.0)


def difference(less: KernelDistance, more: KernelDistance) -> Link:
    """Return the difference of two losses' KIDs x1000, paired by seed."""
    middle, half = 1e3 * (more.value - less.value), 1e3 * Z95 * more.difference_error(less)
    return Link(middle, middle - half, middle + half, none=0.0)


def links_of(found: Measured, chains: Mapping[str, Sequence[str]]) -> list[Row]:
    """Return a row for each pair of neighbours in a chain, by each measure that both have."""
    distances: dict[str, dict[str, list[float]]] = {"to reference image": {}, "to the baseline": {}}
    for single in found.singles:
        for measure_name, key in (
            ("to reference image", "reference_distance"),
            ("to the baseline", "baseline_distance"),
        ):
            if single[key] is not None:
                distances[measure_name].setdefault(single["method"], []).append(single[key])
    rows = []
    for chain, keys in chains.items():
        for less, more in pairwise(keys):
            links = {
                name: ratio(of[less], of[more])
                for name, of in distances.items()
                if less in of and more in of and (chain, name) != ("steps", "to the baseline")
            }
            if less in found.kernels and more in found.kernels:
                links["kid"] = difference(found.kernels[less], found.kernels[more])
            for name, link in links.items():
                values = {"value": link.value, "low": link.low, "high": link.high, "verdict": link.verdict}
                rows.append({"chain": chain, "less": less, "more": more, "measure": name} | values)
    return rows


def _interval(row: Row) -> str:
    return f"{row['value']:.3g} ({row['low']:.3g} to {row['high']:.3g})"


COLUMNS = [
    Column("smaller < greater loss", pair_of),
    Column("measure", lambda row: row["measure"]),
    Column("greater / smaller, or difference", _interval),
    Column("", lambda row: row["verdict"]),
]
