"""Gain: the cost of fewer steps that come as near, over a method's own cost."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Array = np.ndarray
RESAMPLES = 200


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
    """What a method's gain is, with a 95% interval; below 1 fewer steps are the better buy.

    `beyond` says that its distance lies outside of all that fewer steps were measured at ("more" or "less"
    than `value`), or is None.
    """

    value: float
    low: float
    high: float
    beyond: str | None = None


def gain(ours: Array, cost: float, plain: Sequence[Array], costs: Sequence[float]) -> Gain:
    """Return the cost of fewer steps at a method's distance, over its own cost.

    The interval is a paired bootstrap's: seeds are drawn with replacement, for all alike. A seed at which
    a row's image is the reference itself (a distance of 0) is in no mean, as in the means that are shown.

    Args:
        ours: a method's distances (P,) to the reference images, one a seed.
        cost: what an image of the method costs.
        plain: for each number of steps of the same sampler, its distances (P,) for the same seeds.
        costs: what an image of each costs.
    """
    every = np.stack([np.asarray(one, float) for one in (ours, *plain)])
    if (apart := (every > 0).all(axis=0)).any():
        every = every[:, apart]
    own, *rest = np.log(np.maximum(every, 1e-12))
    logs = np.stack(rest)

    def value(picked: Array) -> float:
        return cost_at(np.exp(own[picked].mean()), np.asarray(costs), np.exp(logs[:, picked].mean(1))) / cost

    everyone = np.arange(len(own))
    random = np.random.default_rng(0)
    drawn = [value(random.integers(len(own), size=len(own))) for _ in range(RESAMPLES)]
    low, high = np.quantile(drawn, [0.025, 0.975])
    mean, curve = own.mean(), logs.mean(1)
    beyond = "more" if mean < curve.min() else "less" if mean > curve.max() else None
    return Gain(value(everyone), float(low), float(high), beyond)
