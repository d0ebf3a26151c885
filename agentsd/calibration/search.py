"""Find, on a user's own model and prompts, the plan of a run that meets a goal."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from diffusers.utils import logging

from ..attention import Operator
from ..checks import check
from ..hosts.models import weights_digest
from ..recipe import Recipe
from .attention import OPERATORS
from .cost import Cost
from .fewer import promises
from .goal import check_arguments, check_goal, free_unet
from .journal import Journal, Tell, plain
from .measured import MAX_AGE, MAX_KEPT, Measured
from .plans import Found, plans_of
from .program import best_plans
from .runs import Figures, Runs

TRIES = 3
"""Times that plans are looked for again, where those measured were slower than predicted."""
FINALISTS = 3
"""Of the plans that are run on the first prompt, those that are run on all."""
FRONTIER = 32
"""Plans of a frontier that are looked through for a distance, at most."""
_MARGIN = 1.1  # by which a goal is out of reach beyond doubt


def calibrate(
    pipe: Any,
    prompts: Sequence[str],
    *,
    speedup: float | None = None,
    max_distance: float | None = None,
    held_out: Sequence[str] = (),
    reference_steps: int | None = None,
    cost: Cost = "macs",
    operators: Sequence[Operator] = OPERATORS,
    early_frac: float = 0.4,
    num_inference_steps: int = 25,
    guidance_scale: float = 7.5,
    seed: int = 0,
    resume: str | Path | None = None,
    on_step: Tell | None = None,
    **call_kwargs: Any,
) -> Recipe:
    """Plan a run: which steps are cached or conditional-only, and what each self-attention layer runs.

    On recorded baseline runs it is measured what a call would lose, by the last computed steps and the last
    guided one that it is made from, and what each operator would lose in each layer and phase. As if losses
    added up, the plans of least loss are found for every cost; the best of them are run, and the one that
    meets the goal with the least distance (or the fastest) is returned. Its steps are kept by noise level, so
    that it serves other numbers of steps.

    Args:
        pipe: a diffusers text-to-image pipeline (or another that takes prompts first) with a Stable Diffusion
            `unet` that is not compiled yet; it is left as it was.
        prompts: what to run; a handful that is like the prompts to come.
        speedup: the goal: the cost of a baseline run's U-Net calls over what it is to be; more than 1.
        max_distance: or the goal: the largest `Figures.distance` of the final latents to the baseline's.
        held_out: prompts that nothing is chosen by; what the recipe promises is measured on them.
        reference_steps: so many more steps, such as 100, lead to the latents that fewer steps and the recipe
            are compared by; without it they are by the baseline's own.
        cost: what counts as cost: "macs" (exact) or "time" (CPU seconds; on a GPU seconds), which
            needs a machine that does nothing else.
        operators: of self-attention that are tried, with settings of their own; none plans calls alone.
        early_frac: share of the steps in which layers may run something else than in the later ones.
        num_inference_steps, guidance_scale, call_kwargs: of the pipeline's call.
        seed: the first prompt's; the i-th has seed + i, held-out ones after the others.
        resume: a file that keeps what was measured; the same call goes on from it, with any goal.
        on_step: told how many of how many figures are there, in place of a progress bar.

    Returns:
        A recipe for `apply_agentsd(pipe, recipe=...)`. Its `measured` has the "goal", the "plan" (a symbol a
        step, as `AgentHandle.summary`), what it "promises" (with the baseline in "fewer_steps" that cost
        about as
        much, their noise levels, and whether the plan is "beaten_by_fewer_steps"), what was "found" on the
        prompts it was chosen by, and what it was "made_on".

    Raises:
        TypeError: `pipe` is no pipeline with a U-Net.
        ValueError: an argument is out of range, the U-Net is patched or compiled, there is not exactly one
            goal, the sampler is for few steps, `resume` is of something else, or nothing meets the goal; the
            message says what can be had.
    """
    check_goal(speedup, max_distance)
    check_arguments(prompts, held_out, cost, operators, early_frac, call_kwargs)
    way_out = f"pass more than num_inference_steps={num_inference_steps}, such as 100"
    check("reference_steps", reference_steps, (reference_steps or math.inf) > num_inference_steps, way_out)
    unet = free_unet(pipe, operators, num_inference_steps)
    made_on = {
        "model": _name_of(pipe),
        "weights": weights_digest(unet),
        "steps": num_inference_steps,
        "sampler": type(pipe.scheduler).__name__,
        "guidance_scale": guidance_scale,
        "prompts": list(prompts),
        "seed": seed,
        "cost": cost,
        "device": unet.device.type,
        "dtype": str(unet.dtype).removeprefix("torch."),
        "versions": {name: version(name) for name in ("agentsd", "torch", "diffusers")},
    }
    of = made_on | {
        "held_out": list(held_out),
        "reference_steps": reference_steps,
        "operators": [repr(operator) for operator in operators],
        "early_frac": early_frac,
        "sampler_settings": {n: plain(v) for n, v in pipe.scheduler.config.items() if n[0] != "_"},
        "call": plain(call_kwargs),
    }
    settings = {"num_inference_steps": num_inference_steps, "guidance_scale": guidance_scale, **call_kwargs}
    own = range(len(prompts))
    judged = range(len(prompts), len(prompts) + len(held_out)) if held_out else own
    with _telling(pipe, on_step) as tell:
        journal = Journal(None if resume is None else Path(resume), of, tell)
        every, counted = [*prompts, *held_out], (0, len(prompts))
        runs = Runs(pipe, unet, cost, every, counted, seed, settings, journal, judged, reference_steps)
        with Measured(
            pipe, unet, runs, len(prompts), journal, cost, guidance_scale, operators, early_frac
        ) as measured:
            measured.begin()
            if speedup is not None:
                _check_reach(measured, speedup)
            measured.measure()
        kinds = plans_of(measured, early_frac)
        if speedup is not None:
            best = _of_speedup(kinds, measured.baseline_cost, speedup, runs, own)
        else:
            best = _of_distance(kinds, max_distance or 0.0, runs, own)
        figures = runs.compare(best.recipe, own)
        side = pipe.vae_scale_factor if hasattr(pipe, "vae_scale_factor") else 8
        found = {
            "goal": {"max_distance": max_distance} if speedup is None else {"speedup": speedup},
            "plan": best.plan.symbols,
            "promises": promises(pipe, runs, measured, best.recipe, judged) | {"held_out": bool(held_out)},
            "found": {
                "speedup": figures.speedup,
                "distance": figures.distance,
                "predicted_speedup": measured.baseline_cost / best.plan.cost,
                "predicted_distance": best.distance,
            },
            "made_on": made_on | {"size": [side * n for n in runs.baseline(0)[0].shape[-2:]]},
        }
        journal.finish()
    return replace(best.recipe, measured=found)


def _name_of(pipe: Any) -> str:
    """A pipeline's hub id, its folder's name, or its class."""
    name = str(pipe.config.get("_name_or_path") or type(pipe).__name__)
    return Path(name).resolve().name if Path(name).is_dir() else name


@contextmanager
def _telling(pipe: Any, on_step: Tell | None) -> Iterator[Tell]:
    """Whom to tell of progress: the caller, or a bar; the pipeline's own bars are off."""
    before = dict(getattr(pipe, "_progress_bar_config", {}))
    pipe.set_progress_bar_config(**before | {"disable": True})
    try:
        if on_step is not None:
            yield on_step
            return
        with logging.tqdm(desc="calibrating") as bar:
            shown = 0

            def show(done: int, total: int) -> None:
                nonlocal shown
                bar.total = total
                bar.update(done - shown)
                shown = done

            yield show
    finally:
        pipe.set_progress_bar_config(**before)


def _check_reach(measured: Measured, goal: float) -> None:
    """Raise ValueError for a speed-up that no plan has, whatever it may lose."""
    choice = measured.greatest_saving
    plans = best_plans(
        len(measured.levels),
        lambda step, symbol, computed, _: measured.cost(step, symbol, computed, choice),
        lambda *call: 0.0,
        phases={0: 1},
        order=0,
        conditional=measured.guided,
        max_age=MAX_AGE,
        max_kept=MAX_KEPT,
    )
    most = measured.baseline_cost / plans[-1].cost
    if goal > _MARGIN * most:
        raise ValueError(f"speedup={goal} cannot be met in these runs: the greatest is about {most:.2f}")


def _of_speedup(
    kinds: list[list[Found]], baseline: int, goal: float, runs: Runs, numbers: Sequence[int]
) -> Found:
    """Of the best plans of each kind that are fast enough, the one that ends nearest to the baseline."""
    budget = baseline / goal
    most = 0.0
    for _ in range(TRIES):
        fitting = [next((one for one in kind if one.plan.cost <= budget), None) for kind in kinds]
        tried = list({one.recipe: one for one in fitting if one is not None}.values())
        if not tried:
            break
        tried.sort(key=lambda one: _compare(runs, one, numbers[:1]).distance)
        seen = [(one, _compare(runs, one, numbers)) for one in tried[:FINALISTS]]
        if meets := [pair for pair in seen if pair[1].speedup >= goal]:
            return min(meets, key=lambda pair: pair[1].distance)[0]
        most = max(figures.speedup for _, figures in seen)
        budget *= min(0.98, 0.99 * most / goal)
    reach = baseline / min(one.plan.cost for kind in kinds for one in kind)
    if reach < goal:
        raise ValueError(f"speedup={goal} cannot be met in these runs: the greatest is about {reach:.2f}")
    raise ValueError(
        f"speedup={goal} was predicted, but the plans that were run had {most:.2f} at most: ask for less, or "
        "on a machine that does other things too pass cost='macs'"
    )


def _of_distance(kinds: list[list[Found]], goal: float, runs: Runs, numbers: Sequence[int]) -> Found:
    """Of the plans that no other beats, the fastest one that is seen to end near enough to the baseline.

    By bisection on the first prompt, among plans with attention and among those without; then dearer ones
    are run on all prompts until one meets the goal.
    """
    seen: list[tuple[Found, Figures]] = []
    for attends in (False, True):
        plans = _thinned([one for kind in kinds for one in kind if one.attends == attends])
        near = partial(_distance, plans, runs, numbers[:1])
        place, back = bisect_right(range(len(plans)), goal, key=near) - 1, 1
        while plans:
            place = max(0, place)
            seen.append((plans[place], _compare(runs, plans[place], numbers)))
            if seen[-1][1].distance <= goal or not place:
                break
            place, back = place - back, 2 * back
    meets = [pair for pair in seen if pair[1].distance <= goal and pair[1].speedup > 1]
    if not meets:
        least = min(figures.distance for _, figures in seen)
        raise ValueError(f"max_distance={goal} cannot be met in these runs: the least seen is {least:.2g}")
    return max(meets, key=lambda pair: pair[1].speedup)[0]


def _thinned(every: list[Found]) -> list[Found]:
    """Of these plans those that no other beats, the nearest and dearest first, a few evenly spread."""
    plans: list[Found] = []
    for one in sorted(every, key=lambda one: one.plan[:2]):
        if not plans or one.distance < plans[-1].distance:
            plans.append(one)
    plans.reverse()
    count = min(FRONTIER, len(plans))
    return [plans[i * (len(plans) - 1) // max(1, count - 1)] for i in range(count)]


def _distance(plans: list[Found], runs: Runs, numbers: Sequence[int], place: int) -> float:
    return _compare(runs, plans[place], numbers).distance


def _compare(runs: Runs, one: Found, numbers: Sequence[int]) -> Figures:
    figures = runs.compare(one.recipe, numbers)
    if set(figures.calls) == {"F"} != set(one.plan.symbols):
        raise ValueError("nothing was skipped in a run under a plan: see the warning for the reason")
    return figures
