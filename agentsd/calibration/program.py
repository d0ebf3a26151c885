"""The plans of least predicted error, for every cost: a dynamic program over the steps of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

Cost = Callable[[int, str, tuple[int, ...], int], int]
"""A call's cost in whole units, by its step, its symbol, the last computed steps and its phase's choice."""
Error = Callable[[int, str, tuple[int, ...], int, int], float]
"""What a call loses, by its step, its symbol, the last computed steps, the last guided step and its
phase's choice."""


class Plan(NamedTuple):
    """A run's calls, and their figures.

    Attributes:
        cost, error: sums over the calls.
        symbols: F, f, H or h for each step, as `agentsd.cache.plan.Kind` has them.
        choices: that of each phase.
    """

    cost: int
    error: float
    symbols: str
    choices: tuple[int, ...]


class Known(NamedTuple):
    """What later calls can be made from.

    Attributes:
        computed: the last computed steps, `order + 1` at most, the latest last.
        guided: the last guided step; a conditional-only step takes the difference of the passes from it.
        renewed: two steps or more were both computed and guided.
    """

    computed: tuple[int, ...]
    guided: int
    renewed: bool


_Label = tuple[float, str, int, Any]  # error so far, symbol, choice, the label before


def best_plans(
    count: int,
    cost: Cost,
    error: Error,
    *,
    phases: Mapping[int, int],
    order: int,
    conditional: bool,
    max_age: int,
    max_kept: int,
) -> list[Plan]:
    """All plans that no other beats in cost and error both.

    A cached step is guided or conditional-only as the computed one before it, as `GuidanceCache` has it; none
    is conditional-only before two steps were computed and guided. A phase's choice holds for all its steps;
    beyond its end no cost and no error depends on it. Errors add up.

    Args:
        count: steps of the run.
        cost, error: of a call.
        phases: how many choices there are from a step on; step 0 begins one.
        order: computed steps that a cached step is made from, less one.
        conditional: whether there may be conditional-only steps.
        max_age: steps from a cached step back to the last computed one, at most.
        max_kept: steps from a conditional-only step back to the last guided one, at most.

    Returns:
        Plans, the dearest and most exact first.
    """
    begun = Known((0,), 0, False)
    labels: dict[tuple[Known, int], dict[int, _Label]] = {
        (begun, choice): {cost(0, "F", (), choice): (error(0, "F", (), -1, choice), "F", choice, None)}
        for choice in range(phases[0])
    }
    for step in range(1, count):
        reached: dict[tuple[Known, int], dict[int, _Label]] = {}
        for (known, before), ways in labels.items():
            choices = range(phases[step]) if step in phases else (before,)
            for symbol, after in _moves(step, known, order, conditional, max_age, max_kept):
                for choice in choices:
                    price = cost(step, symbol, known.computed, choice)
                    lost = error(step, symbol, known.computed, known.guided, choice)
                    best = reached.setdefault((after, choice), {})
                    for spent, label in ways.items():
                        total, place = label[0] + lost, spent + price
                        if place not in best or total < best[place][0]:
                            best[place] = total, symbol, choice, label
        labels = {state: _frontier(ways) for state, ways in reached.items()}
    ends: dict[int, _Label] = {}
    for ways in labels.values():
        for spent, label in ways.items():
            if spent not in ends or label[0] < ends[spent][0]:
                ends[spent] = label
    return [_plan(spent, label, phases) for spent, label in _frontier(ends).items()][::-1]


def _moves(
    step: int, known: Known, order: int, conditional: bool, max_age: int, max_kept: int
) -> Iterator[tuple[str, Known]]:
    """What a step may be, and what is known after it."""
    computed = (*known.computed, step)[-1 - order :]
    was_guided = known.guided >= known.computed[-1]
    differs = step - known.guided <= max_kept
    yield "F", Known(computed, step, True)
    if conditional and known.renewed and differs:
        yield "H", Known(computed, known.guided, True)
    if step - known.computed[-1] > max_age:
        return
    if was_guided:
        yield "f", Known(known.computed, step, known.renewed)
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


def _plan(spent: int, end: _Label, phases: Mapping[int, int]) -> Plan:
    symbols, choices = [], []
    link: _Label | None = end
    while link is not None:
        _, symbol, choice, link = link
        symbols.append(symbol)
        choices.append(choice)
    chosen = tuple(choices[::-1][step] for step in sorted(phases))
    return Plan(spent, end[0], "".join(symbols[::-1]), chosen)
