"""Find, on a user's own model and prompts, which calls of a run are full, cheap, whole or half."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..checks import check
from ..patch import apply_agentsd
from ..recipe import Recipe
from ..reuse import ReuseGuidance, ReuseSteps
from ..reuse.halves import conditional_half, is_guided
from ..reuse.left_out import LeftOut
from ..reuse.run import FEWEST
from .cost import Cost, cost_of
from .goal import check_cost, check_goal, check_prompts, free_unet
from .losses import Losses
from .program import Plan, best_plans
from .recording import Call, cheap_call, record
from .runs import Figures, Runs

MAX_AGE = 4
"""Steps from a cheap call back to the last full one, at most."""
MAX_KEPT = 8
"""Steps from a half call back to the last whole one, at most."""
PROBES = 5
"""Steps whose weight is measured."""
TRIES = 3
"""Times that plans are looked for again, where those measured were slower than predicted."""
_UNITS = 1000  # that a full call of both passes costs


class Found(NamedTuple):
    """A plan, its recipe, and the distance that is predicted of it."""

    plan: Plan
    recipe: Recipe
    distance: float


def calibrate_calls(
    pipe: Any,
    prompts: Sequence[str],
    *,
    speedup: float | None = None,
    max_distance: float | None = None,
    cost: Cost = "multiply_adds",
    num_inference_steps: int = 25,
    guidance_scale: float = 7.5,
    seed: int = 0,
    on_step: Callable[[int, int], None] | None = None,
    **call_kwargs: Any,
) -> Recipe:
    """Choose for each step of a run whether its call is full or cheap, whole or half.

    On recorded stock runs it is measured what a call would lose, by the last full calls and the last whole
    one that it is made from. As if losses added up, the plans of least loss are found for every cost; of
    these the best of each kind are run, and the one that meets the goal with the least distance (or the
    fastest) is returned. It is kept by noise level, so that it serves other numbers of steps.

    Args:
        pipe: a diffusers text-to-image pipeline (or another that takes prompts first) with a Stable Diffusion
            `unet` that is not compiled yet; it is left as it was.
        prompts: what to run; a handful that is like the prompts to come.
        speedup: the goal: the cost of a stock run's U-Net calls over what it is to be; more than 1.
        max_distance: or the goal: the largest `Figures.distance` of the final latents to stock's.
        cost: what counts as cost: "multiply_adds" (exact) or "time" (CPU seconds; on a GPU seconds).
        num_inference_steps, guidance_scale, call_kwargs: of the pipeline's call.
        seed: the first prompt's; the i-th has seed + i.
        on_step: told how many of how many calls and runs are done.

    Returns:
        A recipe of steps and guidance, for `apply_agentsd(pipe, recipe=...)`; `dataclasses.replace` gives it
        to a recipe of attention. `measured` has its "plan" (a symbol a step, as `AgentHandle.summary`), its
        "speedup" and "distance", what was "predicted", the same figures of stock runs in "fewer_steps" that
        cost about as much, whether the plan is "beaten_by_fewer_steps", and what it was all measured on.

    Raises:
        TypeError: `pipe` is no pipeline with a U-Net.
        ValueError: an argument is out of range, the U-Net is patched or compiled, there is not exactly one
            goal, nothing can be left out of such a run, or nothing meets the goal; the message says what can
            be had.
    """
    check_goal(speedup=speedup, max_distance=max_distance)
    check_prompts(prompts)
    check_cost(cost)
    _check_call(num_inference_steps, call_kwargs)
    unet = free_unet(pipe)
    apply_agentsd(unet, recipe=Recipe(steps=ReuseSteps())).remove()  # raises what it would raise later
    settings = {"num_inference_steps": num_inference_steps, "guidance_scale": guidance_scale, **call_kwargs}
    runs = Runs(pipe, unet, cost, prompts, seed, settings)
    progress = _Progress(on_step, len(prompts) * (num_inference_steps + 1) + PROBES)
    found = _plans(_Measured(pipe, unet, cost, runs, guidance_scale, progress))
    if speedup is not None:
        best, figures = _of_speedup(found, speedup, runs, progress)
    else:
        best, figures = _of_distance(found, max_distance or 0.0, runs, progress)
    measured = {
        "goal": {"max_distance": max_distance} if speedup is None else {"speedup": speedup},
        "plan": best.plan.symbols,
        "speedup": figures.speedup,
        "distance": figures.distance,
        "predicted": {"speedup": found.stock / best.plan.cost, "distance": best.distance},
        **_fewer_steps(runs, num_inference_steps, figures, progress),
        "cost": cost,
        "steps": num_inference_steps,
        "sampler": type(pipe.scheduler).__name__,
        "size": [side * getattr(pipe, "vae_scale_factor", 8) for side in runs.stock[0].shape[-2:]],
        "guidance_scale": guidance_scale,
        "prompts": list(prompts),
        "seed": seed,
    }
    progress.finish()
    return replace(best.recipe, measured=measured)


def _check_call(num_inference_steps: int, call_kwargs: dict[str, Any]) -> None:
    way_out = f"pass {FEWEST} or more: shorter runs have no call to spare"
    check("num_inference_steps", num_inference_steps, num_inference_steps >= FEWEST, way_out)
    for name in ("timesteps", "sigmas", "generator", "output_type", "prompt"):
        if name in call_kwargs:
            raise ValueError(f"{name}={call_kwargs[name]!r}: leave it out, calibration sets it itself")


class _Progress:
    """Counts what is done; the total grows as more turns out to be needed."""

    def __init__(self, on_step: Callable[[int, int], None] | None, total: int) -> None:
        self._told, self.done, self.total = on_step, 0, total

    def __call__(self) -> None:
        """One more is done."""
        self.done += 1
        self.total = max(self.total, self.done)
        if self._told is not None:
            self._told(self.done, self.total)

    def finish(self) -> None:
        """All is done."""
        if self._told is not None and self.done < self.total:
            self._told(self.total, self.total)


class _Measured:
    """What single calls lose and cost, measured on stock runs of every prompt.

    Attributes:
        levels: the run's noise levels.
        counts: U-Net calls in each step.
        prices: what a call costs by its symbol, in units.
        losses: of a call.
        weights: of a step's loss.
        power: of stock's latents.
        guided: whether there are two passes.
    """

    def __init__(
        self, pipe: Any, unet: Any, cost: Cost, runs: Runs, guidance_scale: float, tick: _Progress
    ) -> None:
        left_out = LeftOut(unet, 1)
        tap = left_out.hook()
        try:
            for number in range(len(runs.prompts)):
                calls, latents, spent = _recorded(pipe, unet, left_out, runs, number)
                runs.stock.append(latents)
                runs.spent += spent
                tick()
                if number == 0:
                    self._begin(calls, guidance_scale)
                self.losses.add(calls, unet, left_out, tick)
                if number == 0:
                    self.prices = _prices(unet, left_out, cost, calls[-1], self.guided)
                    changes = _probe_changes(self.losses, calls, unet, left_out)
                    self.weights = runs.weigh(self.losses, calls, changes, tick)
        finally:
            tap.remove()
            left_out.end()
        self.power = runs.power

    def _begin(self, calls: list[Call], guidance_scale: float) -> None:
        count = calls[-1].step + 1
        if count < FEWEST:
            raise ValueError(f"a run of {count} steps has no call to spare: {FEWEST} or more are needed")
        given = calls[0].given
        self.levels = list({call.step: call.level for call in calls}.values())
        self.counts = Counter(call.step for call in calls)
        self.guided = guidance_scale > 1 and is_guided(given["sample"], given.get("encoder_hidden_states"))
        self.losses = Losses(guidance_scale if self.guided else None, MAX_AGE, MAX_KEPT)

    def cost(self, step: int, symbol: str) -> int:
        """Of a step, in units (as `program.Cost`)."""
        return self.counts[step] * self.prices[symbol]

    def error(self, step: int, symbol: str, fulls: tuple[int, ...], whole: int) -> float:
        """Of a step (as `program.Error`): its share of the final latents' squared distance."""
        return self.weights[step] * self.losses.of(step, symbol, fulls, whole) / self.power


def _recorded(
    pipe: Any, unet: Any, left_out: LeftOut, runs: Runs, number: int
) -> tuple[list[Call], Tensor, float]:
    """A stock run's calls, its final latents, and its cost."""
    calls: list[Call] = []

    def run() -> Tensor:
        found, latents = record(pipe, unet, left_out, lambda: runs.run(number))
        calls.extend(found)
        return latents

    latents, costs = runs.metered(number, run)
    # All are alike; a first one, which is slower as caches are cold, would flatter what comes after.
    return calls, latents, median(costs) * len(costs) if costs else 0.0


def _prices(unet: Any, left_out: LeftOut, cost: Cost, call: Call, guided: bool) -> dict[str, int]:
    """What each kind of call costs, in units of a thousandth of a full one, rounded up."""
    batch = call.given["sample"].shape[0]
    halved = {name: conditional_half(value, batch) for name, value in call.given.items()}
    hidden = call.hidden
    does: dict[str, Callable[[], Any]] = {
        "F": lambda: unet(**call.given),
        "f": lambda: cheap_call(unet, left_out, call.given, hidden),
    }
    if guided:
        does["H"] = lambda: unet(**halved)
        does["h"] = lambda: cheap_call(unet, left_out, halved, hidden.chunk(2)[1])
    with torch.no_grad():
        spent: dict[str, list[float]] = {symbol: [] for symbol in does}
        for _ in range(1 if cost == "multiply_adds" else 5):  # in turn
            for symbol, run in does.items():
                spent[symbol].append(cost_of(cost, unet.device, run))
    full = median(spent["F"])
    return {symbol: max(1, math.ceil(_UNITS * median(all_) / full)) for symbol, all_ in spent.items()}


def _probe_changes(losses: Losses, calls: list[Call], unet: Any, left_out: LeftOut) -> dict[int, Tensor]:
    """What cheap calls change at a few steps, by their place in the run."""
    last = calls[-1].step
    steps = {1 + round(i * (last - 1) / (PROBES - 1)) for i in range(PROBES)}
    places = {call.step: place for place, call in reversed(list(enumerate(calls)))}
    fulls = {call.step: call for call in calls}
    return {
        places[step]: losses.change(calls[places[step]], [fulls[step - 1]], unet, left_out)
        for step in sorted(steps)
    }


class _Plans(NamedTuple):
    """The best plans of each kind, the dearest first, and what a stock run costs in the same units."""

    kinds: list[list[Found]]
    stock: int


def _plans(measured: _Measured) -> _Plans:
    """The frontier of each kind of plan: cheap calls of either order, with half calls or without."""
    count = len(measured.levels)
    kinds = []
    for order in (0, 1):
        for halves in (False, True) if measured.guided else (False,):
            limits = {"max_age": MAX_AGE, "max_kept": MAX_KEPT}
            plans = best_plans(count, measured.cost, measured.error, order=order, halves=halves, **limits)
            kinds.append(
                [_found(plan, order, measured.levels) for plan in plans if set(plan.symbols) != {"F"}]
            )
    return _Plans(kinds, sum(measured.cost(step, "F") for step in range(count)))


def _found(plan: Plan, order: int, levels: list[float]) -> Found:
    named = [int(level) if level == int(level) else level for level in levels]
    full = tuple(level for level, symbol in zip(named, plan.symbols, strict=True) if symbol in "FH")
    whole = tuple(level for level, symbol in zip(named, plan.symbols, strict=True) if symbol == "F")
    steps = ReuseSteps(order=order, at=full) if set(plan.symbols) & set("fh") else None
    guidance = ReuseGuidance(at=whole) if set(plan.symbols) & set("Hh") else None
    return Found(plan, Recipe(steps=steps, guidance=guidance), math.sqrt(plan.error))


def _of_speedup(found: _Plans, goal: float, runs: Runs, tick: _Progress) -> tuple[Found, Figures]:
    """Of the best plans of each kind that are fast enough, the one that ends nearest to stock."""
    budget = found.stock / goal
    most = 0.0
    for _ in range(TRIES):
        fitting = [next((one for one in kind if one.plan.cost <= budget), None) for kind in found.kinds]
        tried = list({one.recipe: one for one in fitting if one is not None}.values())
        if not tried:
            break
        tick.total = max(tick.total, tick.done + len(runs.stock) * (len(tried) + 2))
        seen = [(one, _compare(runs, one, tick)) for one in tried]
        if meets := [pair for pair in seen if pair[1].speedup >= goal]:
            return min(meets, key=lambda pair: pair[1].distance)
        most = max(figures.speedup for _, figures in seen)
        budget *= 0.99 * most / goal
    least = min(one.plan.cost for kind in found.kinds for one in kind)
    most = max(most, found.stock / least)
    raise ValueError(f"speedup={goal} cannot be met in these runs: the greatest is about {most:.2f}")


def _of_distance(found: _Plans, goal: float, runs: Runs, tick: _Progress) -> tuple[Found, Figures]:
    """Of the plans that no other beats, the fastest one that is seen to end near enough to stock.

    By bisection: where the measured distances are out of order, it is still one that meets the goal.
    """
    plans: list[Found] = []
    for one in sorted((one for kind in found.kinds for one in kind), key=lambda one: one.plan[:2]):
        if not plans or one.distance < plans[-1].distance:
            plans.append(one)
    plans.reverse()  # the nearest and dearest first
    seen: dict[int, Figures] = {}
    tick.total = max(tick.total, tick.done + len(runs.stock) * (len(plans).bit_length() + 2))

    def distance(place: int) -> float:
        if place not in seen:
            seen[place] = _compare(runs, plans[place], tick)
        return seen[place].distance

    bisect_right(range(len(plans)), goal, key=distance)
    meets = [place for place, figures in seen.items() if figures.distance <= goal and figures.speedup > 1]
    if not meets:
        least = min(figures.distance for figures in seen.values())
        raise ValueError(f"max_distance={goal} cannot be met in these runs: the least is {least:.2g}")
    place = max(meets, key=lambda place: seen[place].speedup)
    return plans[place], seen[place]


def _compare(runs: Runs, one: Found, tick: _Progress) -> Figures:
    figures = runs.compare(one.recipe, tick)
    if set(figures.calls) == {"F"}:
        raise ValueError("nothing was left out of a run under a plan: see the warning for the reason")
    return figures


def _fewer_steps(runs: Runs, steps: int, figures: Figures, tick: _Progress) -> dict[str, Any]:
    """Stock runs of the two numbers of steps around the plan's cost, and whether they end nearer."""
    exact = steps / figures.speedup
    rows = []
    for count in sorted({max(2, math.floor(exact)), max(2, math.ceil(exact))}):
        plain = runs.compare(None, tick, num_inference_steps=count)
        rows.append({"steps": count, "speedup": plain.speedup, "distance": plain.distance})
    fewer, more = rows[0], rows[-1]
    share = exact - fewer["steps"] if more is not fewer else 0.0
    at_cost = fewer["distance"] ** (1 - share) * more["distance"] ** share
    return {"fewer_steps": rows, "beaten_by_fewer_steps": at_cost <= figures.distance}
