"""Gain: the cost of fewer steps that come as near, over a method's own cost."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..intervals import interval

Array = np.ndarray


def cost_at(distance: float, costs: Array, distances: Array) -> float:
    """Return what fewer steps cost at a distance: linear between the points in the logarithms of both.

    `costs` (N,) are in any order. Of points that do not fall in distance the cheaper one counts, and of
    equally cheap ones the nearer. Beyond the ends it is the nearest end's cost.
    """
    order = np.lexsort((distances, costs))
    costs, distances = np.asarray(costs, float)[order], distances[order]
    nearer = np.concatenate([[True], distances[1:] < np.minimum.accumulate(distances)[:-1]])
    near, cost = -np.log(distances[nearer]), np.log(costs[nearer])
    return float(np.exp(np.interp(-np.log(distance), near, cost)))


@dataclass(frozen=True)
class Gain:
    """What a method's gain is, with a 95% interval or None; below 1 fewer steps are the better buy.

    `beyond` says that its distance lies outside of all that fewer steps were measured at ("more" or "less"
    than `value`), or is None.
    """

    value: float
    low: float | None
    high: float | None
    beyond: str | None = None


def gain(
    ours: Array, cost: float, plain: Sequence[Array], costs: Sequence[float], captions: Sequence[str] = ()
) -> Gain:
    """Return the cost of fewer steps at a method's distance, over its own cost.

    The interval is a paired bootstrap's: captions are drawn, for all alike. A seed at which
    a row's image is the reference itself (a distance of 0) is in no mean, as in the means that are shown.

    Args:
        ours: a method's distances (P,) to the reference images, one a seed.
        cost: what an image of the method costs.
        plain: for each number of steps of the same sampler, its distances (P,) for the same seeds.
        costs: what an image of each costs.
        captions: of the images; without them each is by itself.
    """
    every = np.stack([np.asarray(one, float) for one in (ours, *plain)])
    apart = (every > 0).all(axis=0)
    kept = np.flatnonzero(apart if apart.any() else ~apart)
    own, *rest = np.log(np.maximum(every[:, kept], 1e-12))
    logs = np.stack(rest)

    def values(counts: Array) -> Array:
        shares = counts / counts.sum(1, keepdims=True)
        points = zip(np.exp(shares @ own), np.exp(shares @ logs.T), strict=True)
        return np.array([cost_at(far, np.asarray(costs), curve) for far, curve in points]) / cost

    low, high = interval(values, [captions[int(i)] for i in kept] if captions else kept) or (None, None)
    mean, curve = own.mean(), logs.mean(1)
    beyond = "more" if mean < curve.min() else "less" if mean > curve.max() else None
    return Gain(float(values(np.ones((1, len(own))))[0]), low, high, beyond)
