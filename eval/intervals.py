"""95% intervals: of how many images there is one, and how it is made. The one place for both."""

from collections.abc import Callable, Mapping, Sequence
from statistics import NormalDist
from typing import Any

import numpy as np

Array = np.ndarray
FEWEST = 30
"""Images of a row, and captions, below which no interval is told: too few of them hold the truth."""
DRAWS = 2000
"""Of a bootstrap, for the ends of an interval."""


def enough(row: Mapping[str, Any], count: str = "images") -> bool:
    """Whether a row has images and captions enough for an interval."""
    return min(int(row.get(key) or FEWEST) for key in (count, "captions")) >= FEWEST


def half(error: float, units: int) -> float:
    """Return half of an interval around a mean of so many, from its standard error: by Student's t."""
    z = NormalDist().inv_cdf(0.975)
    freedom = max(units - 1, 1)
    return error * (z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2))


def interval(
    statistic: Callable[[Array], Array], captions: Sequence[Any] | Array
) -> tuple[float, float] | None:
    """Return the ends of a statistic's interval, from a bootstrap; None of too few captions.

    Captions are drawn, each with all of its images. The percentiles lie as much further out as Student's t
    does for so few (Hesterberg 2015, the expanded percentile interval): plain ones are too narrow.

    Args:
        statistic: (draws, N), how often each image is drawn, to (draws,).
        captions: of the N images.
    """
    if (units := len(set(captions))) < FEWEST:
        return None
    outside = NormalDist().cdf(-half((units / (units - 1)) ** 0.5, units))
    low, high = np.quantile(statistic(drawn(captions, DRAWS)), [outside, 1 - outside])
    return float(low), float(high)


def captions_of(singles: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what is drawn with each of single images' rows: its prompt; without one it is by itself."""
    return [str(single.get("prompt", number)) for number, single in enumerate(singles)]


def drawn(captions: Sequence[Any] | Array, draws: int) -> Array:
    """Return how often each of N images is drawn, (draws, N), the same for every row of these captions."""
    _, member = np.unique(np.asarray(captions), return_inverse=True)
    units = int(member.max()) + 1
    picked = np.random.default_rng(0).integers(units, size=(draws, units))
    places = picked + units * np.arange(draws)[:, None]
    return np.bincount(places.ravel(), minlength=draws * units).reshape(draws, units)[:, member]


def sums(values: Array, captions: Sequence[str] | None) -> Array:
    """Return values (N,) summed over the images of each caption; without captions each is its own."""
    if captions is None:
        return values
    _, member = np.unique(np.asarray(captions), return_inverse=True)
    return np.bincount(member, weights=values)


def standard_error(values: Array, captions: Sequence[str] | None = None) -> float:
    """Return the standard error of the mean of values (N,), whose images may share captions."""
    parts = sums(np.asarray(values, float) - np.mean(values), captions)
    units = len(parts)
    return float(np.sqrt((parts**2).sum() * units / (units - 1)) / len(values)) if units > 1 else float("nan")
