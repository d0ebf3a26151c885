"""The plans of least predicted error, for every cost: a dynamic program over the steps of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

Cost = Callable[[int, str], int]
"""What a call costs, by its step and symbol, in whole units."""
Error = Callable[[int, str, tuple[int, ...], int], float]
"""What a call loses, by its step, its symbol, the last full steps and the step of the last whole call."""


class Plan(NamedTuple):
    """A run's calls, and their figures.

    Attributes:
        cost, error: sums over the calls.
        symbols: F, f, H or h for each step, as `agentsd.reuse.plan.Kind` has them.
    """

    cost: int
    error: float
    symbols: str


class Known(NamedTuple):
    """What later calls can be made from.

    Attributes:
        fulls: the last full steps, `order + 1` at most, the latest last.
        whole: the step of the last whole call; a half call takes the difference of the passes from it.
        renewed: two calls or more were both full and whole.
    """

    fulls: tuple[int, ...]
    whole: int
    renewed: bool


_Label = tuple[float, str, Any]  # error so far, symbol, the label before


def best_plans(
    count: int, cost: Cost, error: Error, *, order: int, halves: bool, max_age: int, max_kept: int
) -> list[Plan]:
    """All plans that no other beats in cost and error both.

    A cheap call is whole or half as the full one before it, as `ReuseGuidance` has it; none is half before
    two calls were full and whole. Errors add up.

    Args:
        count: steps of the run.
        cost, error: of a call.
        order: full steps that a cheap call is made from, less one.
        halves: whether there may be half calls.
        max_age: steps from a cheap call back to the last full one, at most.
        max_kept: steps from a half call back to the last whole one, at most.

    Returns:
        Plans, the dearest and most exact first.
    """
    start: _Label = (error(0, "F", (), -1), "F", None)
    labels: dict[Known, dict[int, _Label]] = {Known((0,), 0, False): {cost(0, "F"): start}}
    for step in range(1, count):
        reached: dict[Known, dict[int, _Label]] = {}
        for known, ways in labels.items():
            for symbol, after in _moves(step, known, order, halves, max_age, max_kept):
                price, lost = cost(step, symbol), error(step, symbol, known.fulls, known.whole)
                best = reached.setdefault(after, {})
                for spent, label in ways.items():
                    total, place = label[0] + lost, spent + price
                    if place not in best or total < best[place][0]:
                        best[place] = total, symbol, label
        labels = {known: _frontier(ways) for known, ways in reached.items()}
    ends: dict[int, _Label] = {}
    for ways in labels.values():
        for spent, label in ways.items():
            if spent not in ends or label[0] < ends[spent][0]:
                ends[spent] = label
    return [Plan(spent, label[0], _symbols(label)) for spent, label in _frontier(ends).items()][::-1]


def _moves(
    step: int, known: Known, order: int, halves: bool, max_age: int, max_kept: int
) -> Iterator[tuple[str, Known]]:
    """What a step may be, and what is known after it."""
    fulls = (*known.fulls, step)[-1 - order :]
    was_whole = known.whole >= known.fulls[-1]
    differs = step - known.whole <= max_kept
    yield "F", Known(fulls, step, True)
    if halves and known.renewed and differs:
        yield "H", Known(fulls, known.whole, True)
    if step - known.fulls[-1] > max_age:
        return
    if was_whole:
        yield "f", Known(known.fulls, step, known.renewed)
    elif differs:
        yield "h", known


def _frontier(ways: dict[int, _Label]) -> dict[int, _Label]:
    """Those that no cheaper one equals, the cheapest first."""
    kept: dict[int, _Label] = {}
    least = float("inf")
    for spent in sorted(ways):
        if ways[spent][0] < least:
            least, kept[spent] = ways[spent][0], ways[spent]
    return kept


def _symbols(label: _Label) -> str:
    symbols = ""
    link: _Label | None = label
    while link is not None:
        _, symbol, link = link
        symbols = symbol + symbols
    return symbols
