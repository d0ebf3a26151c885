"""What the steps of a run lose and cost by what they skip: measured on baseline runs of every prompt."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from statistics import mean, median
from typing import Any

import torch

from ..attention import Operator
from ..cache.conditional import conditional_half, is_guided
from ..cache.skipped import SkippedLayers
from ..cache.suited import FEWEST
from ..hosts.models import EVERY_LEVEL, Site, find_sites
from ..hosts.schedulers import Sampler
from ..patch import apply_agentsd
from ..recipe import Recipe
from .attention import Choice, Effect, choices_of, cost_of_layers, try_operator
from .cost import Cost, cost_of
from .journal import Journal
from .losses import Losses, mean_square
from .recording import Call, cached_step, record
from .runs import Runs

MAX_AGE = 4
"""Steps from a cached step back to the last computed one, at most."""
MAX_KEPT = 8
"""Steps from a conditional-only step back to the last guided one, at most."""
PROBES = 5
"""Steps whose weight is measured."""
RECORDED = 2
"""Prompts whose runs' calls are recorded, at most."""
SMALL = 0.01
"""Share of a computed step's cost below which a layer stays baseline."""
CHOICES = 4
"""What the layers of a phase may run together, at most."""
UNITS = 100
"""That a computed step of both passes costs."""


class Measured:
    """Runs what is to be measured, or takes it from the journal; in a `with` block.

    Args:
        pipe: the pipeline.
        unet: its U-Net.
        runs: of its prompts.
        count: how many prompts there are to choose by.
        journal: of what was measured.
        cost: what is counted.
        guidance_scale: of the runs.
        operators: that are tried in self-attention.
        early_frac: share of the steps that are early.

    Attributes:
        levels: the run's noise levels.
        early: whether each step is early.
        guided: whether there are two passes.
        corrects: whether cached steps can be corrected under the run's sampler.
        choices: what the layers may run in each phase; the early one is under True.
    """

    def __init__(
        self,
        pipe: Any,
        unet: Any,
        runs: Runs,
        count: int,
        journal: Journal,
        cost: Cost,
        guidance_scale: float,
        operators: Sequence[Operator],
        early_frac: float,
    ) -> None:
        self._pipe, self._unet, self._runs = pipe, unet, runs
        self._count = min(count, RECORDED)
        self._get, self._cost, self._early_frac = journal.get, cost, early_frac
        self._operators = operators
        self._sites = find_sites(unet, EVERY_LEVEL, at_most=True) if operators else []
        self._skipped = SkippedLayers(unet, 1)
        self._recorded: tuple[int, list[Call]] = -1, []
        self.levels: list[float] = []
        self.early: list[bool] = []
        self.guided = False
        self.corrects = False
        self.choices: dict[bool, list[Choice]] = {}
        self._journal, self._scale = journal, guidance_scale

    def __enter__(self) -> Measured:
        self._tap = self._skipped.hook()
        return self

    def __exit__(self, *error: object) -> None:
        self._tap.remove()
        self._skipped.end()

    def begin(self) -> None:
        """Run baseline once, and measure what calls cost."""
        facts = self._get("calls", self._facts)
        self._steps: list[int] = facts["steps"]
        if (count := self._steps[-1] + 1) < FEWEST:
            raise ValueError(f"a run of {count} steps has no call to spare: {FEWEST} or more are needed")
        first = [self._steps.index(step) for step in range(count)]
        self.levels = [facts["levels"][place] for place in first]
        self.early = [facts["early"][place] for place in first]
        self.guided, self.corrects = facts["guided"], facts["corrects"]
        self._counts = Counter(self._steps)
        self._losses = Losses(self._scale if self.guided else None, MAX_AGE, MAX_KEPT)
        self._journal.expect(self._to_come())
        self._prices = self._get("prices", self._measure_prices)

    def _facts(self) -> dict[str, Any]:
        calls = self._calls(0)
        given = calls[0].given
        return {
            "steps": [call.step for call in calls],
            "levels": [call.level for call in calls],
            "early": [call.early for call in calls],
            "corrects": any(Sampler(self._pipe.scheduler, [call.level for call in calls]).steps()),
            "guided": self._scale > 1 and is_guided(given["sample"], given.get("encoder_hidden_states")),
        }

    def _to_come(self) -> int:
        """Figures that are asked for after the first run's."""
        trials = len(set(self.early)) * (1 + len(self._sites) * len(self._operators))
        return PROBES + self._count * (2 + len(self._steps) + trials)

    def _calls(self, number: int) -> list[Call]:
        """A baseline run's calls; those of one run are held."""
        if self._recorded[0] != number:
            calls: list[Call] = []

            def run() -> Any:
                found, latents = record(
                    self._pipe, self._unet, self._skipped, self._early_frac, lambda: self._runs.run(number)
                )
                calls.extend(found)
                return latents

            self._runs.baseline(number, run)
            if not calls:  # its latents are known
                run()
            self._recorded = number, calls
        return self._recorded[1]

    def measure(self) -> None:
        """Measure what calls lose."""
        tried: list[dict[tuple[str, bool], dict[Operator, Effect]]] = []
        for number in range(self._count):
            for place in range(len(self._steps)):
                rows = self._get(f"losses {number} {place}", partial(self._losses_of, number, place))
                self._losses.add(rows)
            if number == 0:
                self._weights = self._weigh()
            tried.append(self._try_operators(number))
        self._power = self._runs.power(range(self._count))
        self.choices = {phase: self._choices(tried, phase) for phase in set(self.early)}

    def _losses_of(self, number: int, place: int) -> list[list[Any]]:
        return self._losses.measure(self._calls(number), place, self._unet, self._skipped)

    def _measure_prices(self) -> dict[str, float]:
        """What each kind of call costs; and a computed one with an operator in every layer, by its number."""
        call = self._calls(0)[-1]
        batch = call.given["sample"].shape[0]
        halved = {name: conditional_half(value, batch) for name, value in call.given.items()}
        does: dict[str, Callable[[], Any]] = {
            "F": lambda: self._unet(**call.given),
            "f": lambda: cached_step(self._unet, self._skipped, call.given, call.hidden),
        }
        if self.guided:
            does["H"] = lambda: self._unet(**halved)
            does["h"] = lambda: cached_step(self._unet, self._skipped, halved, call.hidden.chunk(2)[1])
        for number, operator in enumerate(self._operators):
            does[str(number)] = partial(self._all_run, operator, call)
        with torch.no_grad():
            spent: dict[str, list[float]] = {symbol: [] for symbol in does}
            for _ in range(1 if self._cost == "macs" else 5):  # in turn
                for symbol, run in does.items():
                    spent[symbol].append(cost_of(self._cost, self._unet.device, run))
        return {symbol: median(all_) for symbol, all_ in spent.items()}

    def _all_run(self, operator: Operator, call: Call) -> None:
        with apply_agentsd(self._unet, recipe=Recipe(layers={site.name: operator for site in self._sites})):
            self._unet(**call.given)

    def _weigh(self) -> list[float]:
        """How much the final latents' mean square moves for each unit of a step's loss.

        Not a formula of the noise levels: how far an error at a step carries depends on the sampler and on
        what the model makes of it afterwards. So the first run is made again with one call's output changed
        as a cached step changes it, at a few steps; between these the weight's logarithm is a line.
        """
        last = self._steps[-1]
        weights = {}
        for step in sorted({1 + round(i * (last - 1) / (PROBES - 1)) for i in range(PROBES)}):
            if weight := self._get(f"weight {step}", partial(self._weight, step)):
                weights[step] = weight
        return [between(weights, step) for step in range(last + 1)]

    def _weight(self, step: int) -> float:
        calls, place = self._calls(0), self._steps.index(step)
        before = next(call for call in reversed(calls) if call.step == step - 1)
        change = self._losses.change(calls[place], [before], self._unet, self._skipped)
        lost = mean_square(self._losses.guided(change))
        return self._runs.moved_by(calls, place, change) / lost if lost else 0.0

    def _try_operators(self, number: int) -> dict[tuple[str, bool], dict[Operator, Effect]]:
        """What each operator does in each layer and phase, in the phase's middle call."""
        effects: dict[tuple[str, bool], dict[Operator, Effect]] = {}
        for phase in sorted(set(self.early)):
            places = [place for place, step in enumerate(self._steps) if self.early[step] == phase]
            place = places[len(places) // 2]
            name = f"attention {number} {place}"
            baseline = self._get(name, partial(self._baseline_layers, number, place))
            for site in self._sites:
                effects[site.name, phase] = {}
                if baseline[site.name] < SMALL * self._prices["F"]:
                    continue
                for operator in self._operators:
                    trial = partial(self._try, number, place, site, operator)
                    loss, spent = self._get(f"{name} {site.name} {operator}", trial)
                    saved = (baseline[site.name] - spent) / self._prices["F"]
                    effects[site.name, phase][operator] = Effect(loss, saved)
        return effects

    def _baseline_layers(self, number: int, place: int) -> dict[str, float]:
        return cost_of_layers(self._unet, self._sites, self._calls(number)[place], self._cost)

    def _try(self, number: int, place: int, site: Site, operator: Operator) -> tuple[float, float]:
        call = self._calls(number)[place]
        return try_operator(self._unet, site, operator, call, self._losses, self._cost)

    def _choices(
        self, tried: Sequence[Mapping[tuple[str, bool], Mapping[Operator, Effect]]], phase: bool
    ) -> list[Choice]:
        effects: dict[str, dict[Operator, Effect]] = {}
        for site in self._sites:
            seen = [of[site.name, phase] for of in tried]
            common = [operator for operator in self._operators if all(operator in of for of in seen)]
            effects[site.name] = {
                operator: Effect(*map(mean, zip(*(of[operator] for of in seen), strict=True)))
                for operator in common
            }
        deep = {site.name for site in self._sites if self._skipped.holds(site.block)}
        return choices_of(effects, lambda name: name not in deep, CHOICES)

    def cost(self, step: int, symbol: str, computed: tuple[int, ...], choice: Choice) -> int:
        """Of a step, in units, rounded up."""
        computes_all = symbol in "FH"
        of_both = self._prices["F" if computes_all else "f"]
        saved = (choice.computed if computes_all else choice.cached) * self._prices["F"]
        share = (1 - saved / of_both) * self._prices[symbol] / self._prices["F"]
        return self._counts[step] * max(1, math.ceil(UNITS * share))

    def cost_corrected(self, step: int, symbol: str, computed: tuple[int, ...], choice: Choice) -> int:
        """As `cost`, where a computed step computes the cached ones before it once more."""
        again = range(computed[-1] + 1, step) if symbol == "F" and computed else ()
        return self.cost(step, symbol, computed, choice) + sum(
            self.cost(i, "f", computed, choice) for i in again
        )

    def error(self, step: int, symbol: str, computed: tuple[int, ...], guided: int, choice: Choice) -> float:
        """Of a step: its share of the final latents' squared distance.

        Cached steps after the same computed one err alike, so that their errors add up before they are
        squared; a step's share is what it adds to the square. What attention loses in a computed step is in
        the state that cached ones start from: so it counts in each.
        """
        attention = self._weights[step] * self._count * self._counts[step] * choice.loss / self._power
        if symbol in "FH":
            return attention + self._share(step, symbol, computed, guided)
        before = range(computed[-1] + 1, step)
        return (
            attention
            + self._together((*before, step), symbol, computed, guided)
            - self._together(before, symbol, computed, guided)
        )

    def error_corrected(
        self, step: int, symbol: str, computed: tuple[int, ...], guided: int, choice: Choice
    ) -> float:
        """As `error`, where computed steps make up for the cached ones before, which then are told with it.

        What is left of a cached step's error is that of the state between the two computed ones.
        """
        own = self.error(step, "F", (), -1, choice)
        last = step == len(self.levels) - 1
        if symbol == "F":
            cached = range(computed[-1] + 1, step) if computed else ()
            return own + self._together(cached, "b", (*computed[-1:], step))
        ahead = range(computed[-1] + 1, step + 1) if last else ()  # no computed step comes after these
        return own + self._together(ahead, "f", computed)

    def skipped(self, step: int, computed: tuple[int, ...]) -> float:
        """Of a skipped step, as `error`."""
        return self._share(step, "s", computed)

    def _share(self, step: int, symbol: str, computed: tuple[int, ...], guided: int = -1) -> float:
        return self._weights[step] * self._losses.of(step, symbol, computed, guided) / self._power

    def _together(
        self, steps: Iterable[int], symbol: str, computed: tuple[int, ...], guided: int = -1
    ) -> float:
        """The square of a sum of errors, of each of which the square is known."""
        return sum(math.sqrt(self._share(step, symbol, computed, guided)) for step in steps) ** 2

    @property
    def baseline_cost(self) -> int:
        """Of a baseline run, in units."""
        return UNITS * len(self._steps)

    @property
    def greatest_saving(self) -> Choice:
        """Of what any one operator saves in all layers, the most; nothing of it is measured but the cost."""
        spent = [self._prices[str(number)] for number in range(len(self._operators))]
        saved = max(0.0, 1 - min(spent, default=math.inf) / self._prices["F"])
        return Choice(computed=saved, cached=min(saved, 0.99 * self._prices["f"] / self._prices["F"]))


def between(weights: Mapping[int, float], step: int) -> float:
    """The weight of a step, on the line through the logarithms of its neighbours', or the nearest one's."""
    if not weights:
        return 1.0
    below = max((s for s in weights if s <= step), default=min(weights))
    above = min((s for s in weights if s >= step), default=max(weights))
    share = (step - below) / (above - below) if above > below else 0.0
    share = min(max(share, 0.0), 1.0)
    return math.exp((1 - share) * math.log(weights[below]) + share * math.log(weights[above]))
