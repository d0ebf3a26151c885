"""Gain: the cost of fewer steps that come as near, over a method's own cost."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ..intervals import interval

Array = np.ndarray


@dataclass(frozen=True)
class Line:
    """A plain sampler in several numbers of steps: what an image costs, and how far it is from its reference.

    `costs` (N,), one for each number of steps, in any order; `distances` (N, P), one a seed in each.
    """

    costs: Array
    distances: Array


def cost_at(distance: float, costs: Array, distances: Array) -> tuple[float, str | None]:
    """Return what fewer steps cost at a distance: linear between the points in the logarithms of both.

    `costs` and `distances` (N,) are in any order. Of points that do not fall in distance the cheaper one
    counts, and of equally cheap ones the nearer. Beyond the ends it is the nearest end's cost, and the true
    one is "more" or "less".
    """
    order = np.lexsort((distances, costs))
    costs, distances = np.asarray(costs, float)[order], distances[order]
    nearer = np.concatenate([[True], distances[1:] < np.minimum.accumulate(distances)[:-1]])
    near, cost = -np.log(distances[nearer]), np.log(costs[nearer])
    beyond = "more" if distance < distances.min() else "less" if distance > distances.max() else None
    return float(np.exp(np.interp(-np.log(distance), near, cost))), beyond


def cheapest(distance: float, lines: Sequence[tuple[Array, Array]]) -> tuple[float, str | None]:
    """Return the least cost of several lines at a distance, and whether the true one is "more" or "less".

    A sampler that was not measured as near as that might still be the cheapest: its nearest end is a bound.
    """
    return min((cost_at(distance, *line) for line in lines), key=lambda one: one[0])


@dataclass(frozen=True)
class Gain:
    """What a method's gain is, with a 95% interval or None; below 1 fewer steps are the better buy.

    `beyond` says that fewer steps were not measured at its distance, and the gain is "more" or "less" than
    `value`, or is None.
    """

    value: float
    low: float | None
    high: float | None
    beyond: str | None = None


def gain(ours: Array, cost: float, lines: Sequence[Line], captions: Sequence[str] = ()) -> Gain:
    """Return the cost of fewer steps of the best plain sampler at a method's distance, over its own cost.

    The interval is a paired bootstrap's: captions are drawn, for all alike. A seed at which
    a row's image is the reference itself (a distance of 0) is in no mean, as in the means that are shown.

    Args:
        ours: a method's distances (P,) to the reference images, one a seed.
        cost: what an image of the method costs.
        lines: the plain samplers, with distances for the same seeds.
        captions: of the images; without them each is by itself.
    """
    every = np.concatenate([np.asarray(ours, float)[None], *(line.distances for line in lines)])
    apart = (every > 0).all(axis=0)
    kept = np.flatnonzero(apart if apart.any() else ~apart)
    logs = np.log(np.maximum(every[:, kept], 1e-12))
    ends = np.cumsum([1, *(len(line.costs) for line in lines)])

    def least(means: Array) -> tuple[float, str | None]:
        parts = [means[start:end] for start, end in pairwise(ends)]
        return cheapest(means[0], [(line.costs, part) for line, part in zip(lines, parts, strict=True)])

    def values(counts: Array) -> Array:
        means = np.exp(counts @ logs.T / counts.sum(1, keepdims=True))
        return np.array([least(row)[0] for row in means]) / cost

    low, high = interval(values, [captions[int(i)] for i in kept] if captions else kept) or (None, None)
    value, beyond = least(np.exp(logs.mean(1)))
    return Gain(value / cost, low, high, beyond)
