"""Find, on a user's own model and prompts, the recipe that meets a goal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args
from unittest.mock import patch

import numpy as np
from rich.console import Console
from rich.progress import Progress

from agentsd import Recipe, apply_agentsd
from agentsd.checks import check
from agentsd.hosts import find_model
from agentsd.modules.adapter import is_quantized
from agentsd.planning import unsupported_reason

from ..environment import describe_environment
from ..errors import EvalError
from ..images.digest import parts_digest, weights_digest
from ..images.models import scheduler_like
from ..settings import SEEDS
from .candidates import CANDIDATES
from .measurements import Measurements
from .runs import Cost, Row, Runs

FINALISTS = 3
"""Of the candidates that meet the goal on the first prompt, those that are run on all."""
MARGIN = 1.5
"""By which a speed-up above the boldest candidate's is out of reach of all."""
BETTER_SAMPLER = "unipckarras"
"""Beside the pipeline's own in fewer steps: UniPC of order 2 on Karras levels."""
_OWN = {"timesteps", "sigmas", "generator", "output_type", "prompt"}


def calibrate(
    pipe: Any,
    prompts: Sequence[str],
    *,
    speedup: float | None = None,
    max_distance: float | None = None,
    held_out: Sequence[str] = (),
    candidates: Sequence[Recipe] = CANDIDATES,
    reference_steps: int | None = None,
    cost: Cost = "macs",
    num_inference_steps: int = 25,
    guidance_scale: float = 7.5,
    seed: int = 0,
    resume: str | Path | None = None,
    **call_kwargs: Any,
) -> Recipe:
    """Return the candidate that meets a goal with the least distance, or the greatest speed-up.

    Each candidate is run on the first prompt. Of those that meet the goal there, the best three are run on
    all prompts, and the best of these that meets it still is returned, with the metrics of the baseline in as
    many steps as cost the same.

    Args:
        pipe: a diffusers text-to-image pipeline (or another that takes prompts first) with a Stable Diffusion
            `unet` that is not compiled yet; it is left as it was.
        prompts: what to run; a handful that is like the prompts to come.
        speedup: the goal: the cost of a baseline run over what it is to be; more than 1.
        max_distance: or the goal: the largest latent relative RMSE to the baseline, such as 0.05.
        held_out: prompts that nothing is chosen by; the validation metrics are measured on them.
        candidates: what to choose from; the named recipes and variations of them.
        reference_steps: so many more steps, such as 100, lead to the latents that fewer steps and the recipe
            are compared by; without it they are by the baseline's own.
        cost: "macs" (exact) or "seconds" (of a processor; on a GPU of the clock), for which the machine has
            to do nothing else.
        num_inference_steps, guidance_scale, call_kwargs: of the pipeline's call.
        seed: the first prompt's; the i-th has seed + i, held-out ones after the others.
        resume: a file that keeps what was measured: a call that was stopped goes on from it, and one with
            another goal or more candidates measures only what is new.

    Returns:
        A recipe for `apply_agentsd(pipe, recipe=...)`. Its `measured` has the "goal", the "steps" (a letter a
        step, as in `AgentSDHandle.summary`), the "search" metrics on the prompts, the "validation" metrics on
        the held-out ones with "fewer_steps" beside them and whether one is "beaten_by_fewer_steps", and the
        "environment".

    Raises:
        TypeError: `pipe` is no pipeline with a U-Net, or a candidate no recipe.
        ValueError: an argument is out of range, the U-Net is patched, compiled, offloaded layer by layer, or
            quantised where `cost` is "macs", there is not exactly one goal, nothing can be cached in such
            runs, `resume` is no calibration's, or no candidate meets the goal; the message says what can be
            had.
    """
    goal = {"speedup": speedup} if max_distance is None else {"max_distance": max_distance}
    if (speedup is None) == (max_distance is None):
        raise ValueError(f"speedup={speedup}, max_distance={max_distance}: give one goal, one or the other")
    check("speedup", speedup, speedup is None or 1 < speedup < math.inf, "pass more than 1, for instance 1.8")
    ok = max_distance is None or 0 < max_distance < math.inf
    check("max_distance", max_distance, ok, "pass more than 0, for instance 0.05")
    check("prompts", prompts, len(prompts) > 0, "pass a list of a few that are like the ones to come")
    for name, given in (("prompts", prompts), ("held_out", held_out)):
        check(name, given, not isinstance(given, str), "pass a list of prompts")
    both = sorted(set(prompts) & set(held_out))
    check("held_out", both, not both, "they are among the prompts, pass others")
    check("cost", cost, cost in get_args(Cost), "choose 'macs' or 'seconds'")
    for name in _OWN & set(call_kwargs):
        check(name, call_kwargs[name], False, "leave it out, calibration sets it itself")
    for recipe in candidates:
        if not isinstance(recipe, Recipe):
            raise TypeError(f"candidates: {recipe!r} is a {type(recipe).__name__}: pass recipes")
        untrained = not any(operator.needs_module for operator in recipe.operators)
        check("candidates", recipe, untrained, "it is to be trained; only what runs without is calibrated")
    ok = 0 <= seed <= SEEDS - len(prompts) - len(held_out)
    check("seed", seed, ok, f"torch tells {SEEDS:,} seeds apart, from 0 on: pass a smaller one")
    way_out = f"pass more than num_inference_steps={num_inference_steps}, such as 100"
    check("reference_steps", reference_steps, (reference_steps or math.inf) > num_inference_steps, way_out)
    unet = _free_unet(pipe, num_inference_steps, cost)
    usable = [recipe for recipe in candidates if _fits(pipe, recipe)]
    check("candidates", len(candidates), len(usable) > 0, "none of them fits the model: pass others")
    machine = describe_environment(unet.device)
    environment = {
        "model": _name_of(pipe),
        "weights": weights_digest(unet),
        "num_inference_steps": num_inference_steps,
        "scheduler": type(pipe.scheduler).__name__,
        "guidance_scale": guidance_scale,
        "prompts": list(prompts),
        "seed": seed,
        "cost": cost,
        "dtype": str(unet.dtype).removeprefix("torch."),
        **{name: machine[name] for name in ("device", "threads", "versions")},
    }
    of = environment | {
        "held_out": list(held_out),
        "reference_steps": reference_steps,
        **parts_digest(pipe),
        "call": call_kwargs,
    }
    settings = {"num_inference_steps": num_inference_steps, "guidance_scale": guidance_scale, **call_kwargs}
    every = [*prompts, *held_out]
    own = range(len(prompts))
    held = range(len(prompts), len(every)) if held_out else own
    measurements = Measurements(None if resume is None else Path(resume), of)
    quiet = {**getattr(pipe, "_progress_bar_config", {}), "disable": True}
    with (
        patch.object(pipe, "_progress_bar_config", quiet, create=True),
        Progress(console=Console(stderr=True)) as bars,
    ):
        task = bars.add_task("runs", total=len(usable) + FINALISTS * len(own) + 6 * len(held))
        report = partial(bars.advance, task)
        runs = Runs(pipe, every, cost, seed, settings, reference_steps, measurements, report)
        if cost == "seconds":
            runs.run(0, num_inference_steps=2)  # the first is slower, as caches are cold
        best = _search(runs, usable, own, speedup, max_distance)
        search = runs.compare(best, own)
        found = {
            "goal": goal,
            "steps": search.pop("steps"),
            "search": search,
            "validation": _validation(runs, best, held) | {"held_out": bool(held_out)},
            "environment": environment,
        }
    return replace(best, measured=found)


def _search(
    runs: Runs,
    candidates: Sequence[Recipe],
    numbers: Sequence[int],
    speedup: float | None,
    max_distance: float | None,
) -> Recipe:
    """The best candidate that meets the goal on all prompts. Raises ValueError where none does."""

    def meets(row: Row) -> bool:
        if speedup is None:
            return row["distance"] <= (max_distance or 0.0) and row["speedup"] > 1
        return bool(row["speedup"] >= speedup)

    def badness(row: Row) -> float:
        return -row["speedup"] if speedup is None else row["distance"]

    bold, *others = sorted(candidates, key=_boldness, reverse=True)
    first = {bold: runs.compare(bold, numbers[:1])}
    if speedup is None or speedup <= MARGIN * first[bold]["speedup"]:  # else it is out of reach of all
        first |= {recipe: runs.compare(recipe, numbers[:1]) for recipe in others}
    near = sorted((r for r in first if meets(first[r])), key=lambda recipe: badness(first[recipe]))
    every: dict[Recipe, Row] = {}
    for recipe in near:
        every[recipe] = runs.compare(recipe, numbers)
        good = [recipe for recipe, row in every.items() if meets(row)]
        if good and (len(every) >= FINALISTS or recipe is near[-1]):
            return min(good, key=lambda recipe: badness(every[recipe]))
    seen = [*first.values(), *every.values()]
    if speedup is None:
        least = min(row["distance"] for row in seen)
        raise ValueError(
            f"max_distance={max_distance} cannot be met in these runs: the least seen is {least:.2g}"
        )
    most = max(row["speedup"] for row in seen)
    raise ValueError(f"speedup={speedup} cannot be met in these runs: the greatest seen is {most:.2f}")


def _boldness(recipe: Recipe) -> int:
    """How many of 100 steps are cached."""
    return 100 - sum(recipe.steps.full_steps(100)) if recipe.steps else 0


def _validation(runs: Runs, recipe: Recipe, numbers: Sequence[int]) -> Row:
    """The recipe's figures, those of fewer steps that cost about as much, and whether these are the better.

    That goes by the distance to the reference, where there is one: in fewer steps a run strays from it and
    from the baseline in the same direction, so that the distance to the baseline flatters fewer steps. A
    better sampler in fewer steps stands beside them then; it ends elsewhere than the baseline, and nearer.
    """
    row = runs.compare(recipe, numbers)
    exact = runs.settings["num_inference_steps"] / row["speedup"]
    counts = sorted({max(2, math.floor(exact)), max(2, math.ceil(exact))})
    found, name = {"prompts": len(numbers)} | row, "distance"
    samplers: list[str | None] = [None]
    if runs.reference_steps is not None:
        name = "reference_distance"
        found["baseline_reference_distance"] = runs.compare(None, numbers)[name]
        samplers += [BETTER_SAMPLER] * has_better_sampler(runs.pipe.scheduler)
    fewer, beaten = [], False
    for sampler in samplers:
        line = [runs.compare(None, numbers, sampler, num_inference_steps=count) for count in counts]
        fewer += [one | {"steps": count, "sampler": sampler} for one, count in zip(line, counts, strict=True)]
        beaten |= distance_at(row["speedup"], line, name) <= row[name]
    return found | {"fewer_steps": fewer, "beaten_by_fewer_steps": beaten}


def has_better_sampler(scheduler: Any) -> bool:
    """Whether UniPC on Karras levels is another sampler, and can be had on the model's noise schedule."""
    try:
        better = scheduler_like(scheduler, BETTER_SAMPLER)
    except EvalError:
        return False
    return not (isinstance(scheduler, type(better)) and scheduler.config["use_karras_sigmas"])


def distance_at(speedup: float, rows: Sequence[Row], name: str) -> float:
    """The distance of fewer steps at a recipe's cost, on the line between rows of fewer and of more."""
    return float(np.interp(1 / speedup, [1 / row["speedup"] for row in rows], [row[name] for row in rows]))


def _free_unet(pipe: Any, num_inference_steps: int, cost: Cost) -> Any:
    """The pipeline's U-Net. Raises TypeError or ValueError where it can't be calibrated."""
    if not hasattr(pipe, "unet") or not hasattr(pipe, "scheduler"):
        raise TypeError(f"{type(pipe).__name__} is no pipeline with a `unet`, to be run on the prompts")
    unet = find_model(pipe)
    parameters = list(unet.parameters())
    if unet is not pipe.unet or unet._compiled_call_impl is not None:
        raise ValueError("the U-Net is compiled: calibrate first, and compile it afterwards")
    if any(parameter.device.type == "meta" for parameter in parameters):
        raise ValueError("the U-Net's weights are kept elsewhere by sequential offloading: calibrate first")
    if cost == "macs" and any(map(is_quantized, parameters)):
        raise ValueError(
            "cost='macs': the U-Net is quantised, and its products are not counted: pass cost='seconds', or "
            "calibrate first and quantise it afterwards"
        )
    if hasattr(unet, "_agentsd"):
        raise ValueError("the pipeline is patched: call remove_agentsd(pipe) first")
    if reason := unsupported_reason(unet, num_inference_steps, pipe.scheduler):
        raise ValueError(f"nothing can be cached in these runs: {reason}")
    return unet


def _fits(pipe: Any, recipe: Recipe) -> bool:
    """Whether the model has the layers that a candidate changes, and they are free."""
    try:
        apply_agentsd(pipe, recipe=recipe).remove()
    except ValueError:
        return False
    return True


def _name_of(pipe: Any) -> str:
    """A pipeline's hub id, its folder's name, or its class."""
    name = str(pipe.config.get("_name_or_path") or type(pipe).__name__)
    return Path(name).resolve().name if Path(name).is_dir() else name
