"""A whole run's seconds from those of its calls, where a run would take a CPU an hour."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from agentsd import Recipe, StepCache, apply_agentsd
from agentsd.hosts import find_attention_layers
from agentsd.plan import FULL, OPERATOR, plan_run
from agentsd.progress import progress
from agentsd.recipe import MODES, Phases, stages_of

from ..cost.architectures import normal
from ..cost.latency import Case, forward_call, load, row_of, speedup_of
from ..environment import describe_environment, describe_run
from ..errors import EvalError
from ..files import check_writable
from ..images.methods import Method, check_schedulers, expand
from ..images.sampling import Seconds, Stopwatch
from ..pages.cost_table import tables_of
from ..pages.rows import Row, show, write_rows
from .settings import PricedSettings

PROBED = 8
"""Steps of the run whose first calls are timed: step caching takes so many at least."""


def command(settings: PricedSettings, console: Console) -> None:
    """Measure size by size, print the table, and write it."""
    methods = expand(settings.methods, [settings.ratio], settings, settings.fewer_steps)
    check_writable(settings.out / "latency.jsonl")
    pipe = load(settings)
    check_schedulers(methods, pipe.scheduler, settings.steps)
    device = pipe.unet.device
    run = describe_run(settings, describe_environment(device))
    rows: list[Row] = []
    sizes = settings.sizes or (pipe.unet.config.sample_size * pipe.vae_scale_factor,)
    with progress(console) as bars:
        task = bars.add_task("rounds", total=len(sizes) * settings.repeats)
        for size in sizes:
            case, rounds = Case("priced", size, 1), []
            for _ in range(settings.repeats):
                rounds.append(priced(pipe, methods, case, settings))
                bars.advance(task)
            seconds = {method: [of[i] for of in rounds] for i, method in enumerate(methods)}
            for method in methods:
                row = row_of(method, case, settings.repeats, seconds[method])
                rows.append(row | speedup_of(seconds, method, device))
            write_rows(settings.out, "latency", rows, tables_of(rows, run["clock"]), run)
    show(console, rows, tables_of(rows, run["clock"]), "", settings.out)


@dataclass(frozen=True)
class Kind:
    """What a call is, as far as its cost goes.

    Attributes:
        stage: whether it is in the early steps; None where that makes no difference.
        full: all layers are computed.
        attention: of the patched layers (`agentsd.plan`).
    """

    stage: bool | None = None
    full: bool = True
    attention: str = OPERATOR


def recipe_of(method: Method) -> Recipe | None:
    """Return what agentsd runs under a method; None for the baseline. Raises EvalError for other packages.

    DeepCache is step caching that extrapolates and corrects nothing.
    """
    if method.interval is not None and len(method.parts) == 1:
        return Recipe(steps=StepCache(interval=method.interval, extrapolation_order=0, correct=False))
    mode = next((MODES[part] for part in method.parts if part in MODES), None)
    recipe = mode if isinstance(method.recipe, Path) else method.recipe or mode
    if method.parts and (recipe is None or len(method.parts) > 1):
        raise EvalError(
            f"{method.label}: a run is priced for the baseline, DeepCache and recipes; "
            "time this one with agentsd-eval latency --scopes pipeline"
        )
    settings = {} if method.ratio is None else {"ratio": method.ratio}
    return recipe.with_settings(**settings) if recipe and mode and settings else recipe


def on_grid(recipe: Recipe | None, tokens: int) -> Recipe | None:
    """Return what a recipe runs on a grid: without its attention where residuals aren't shared there."""
    if recipe is None or recipe.residual is None:
        return recipe
    if tokens < recipe.residual.least_tokens:
        return replace(recipe, residual=None, attention=None, levels=None)
    return replace(recipe, residual=recipe.residual.on_grid(tokens))


def calls_of(recipe: Recipe | None, timesteps: Sequence[float]) -> Counter[Kind]:
    """Return how many calls of each kind a run on these timesteps makes, corrections among them."""
    if recipe is None:
        return Counter({Kind(): len(timesteps)})
    plan = plan_run(recipe.steps, timesteps, recipe.residual)
    timing = recipe.timing
    early = round(timing.early_frac * len(timesteps)) if isinstance(timing, Phases) else 0
    found: Counter[Kind] = Counter()
    last: Kind | None = None  # of the cached steps that the next full one corrects: it is computed again
    for i in range(len(timesteps)):
        step = plan[i]
        kind = Kind(i < early if timing and step.attention != FULL else None, step.full, step.attention)
        found[kind] += 1
        if not step.full:
            last = kind
        elif recipe.steps is not None and recipe.steps.correct and last is not None:
            found[last] += 1
            last = None
    return found


def unit_costs(pipe: Any, recipe: Recipe | None, call: Any) -> dict[Kind, Seconds]:
    """Return the seconds of a call of each kind but the baseline's.

    Args:
        pipe: the pipeline, whose scheduler's first steps are run.
        recipe: what runs.
        call: takes a timestep and calls the U-Net.
    """
    costs: dict[Kind, Seconds] = {}
    stages = stages_of(recipe.attention) if recipe else ()
    for number, operator in enumerate(stages):
        assert recipe is not None
        stage = number == 0 if len(stages) > 1 else None
        cached = recipe.steps and replace(recipe.steps, interval=2, warmup_steps=1, late_interval=None)
        probes = [cached]
        if cached and recipe.residual and recipe.residual.interval > 1:
            probes.append(None)  # full steps share, too
        for steps in probes:
            residual = recipe.residual and replace(
                recipe.residual, interval=1 if steps else 2, interval_from=0, warmup_steps=1
            )
            probe = replace(recipe, attention=operator, steps=steps, residual=residual)
            pipe.scheduler.set_timesteps(PROBED)
            plan = plan_run(steps, [float(t) for t in pipe.scheduler.timesteps], residual)
            with apply_agentsd(pipe, recipe=probe):
                probed = pipe.scheduler.timesteps[: 2 if steps or residual else 1]
                for kind, timestep in zip(plan, probed, strict=False):
                    costs[Kind(stage, kind.full, kind.attention)] = call(timestep)
    return costs


@torch.no_grad()
def priced(pipe: Any, methods: Sequence[Method], case: Case, settings: PricedSettings) -> list[Seconds]:
    """Return the seconds of a run of each method, autoencoder and all, from one call of each kind."""
    device, side = pipe.unet.device, case.size // pipe.vae_scale_factor
    latent = torch.empty(1, 1, side, side, device="meta")
    grid = find_attention_layers(pipe.unet, 1, at_most=True)[0].grid(latent)

    def timed(run: Any) -> Seconds:
        with Stopwatch(device) as watch:
            run()
        return watch.seconds

    unet_call = forward_call(pipe, case, settings.guidance_scale)
    call = lambda timestep: timed(lambda: unet_call(timestep))  # noqa: E731
    shape = case.batch, pipe.vae.config.latent_channels, side, side
    latents = normal(shape, torch.Generator("cpu").manual_seed(0), pipe.vae)
    decoding = timed(lambda: pipe.vae.decode(latents))
    pipe.scheduler.set_timesteps(PROBED)
    baseline = call(pipe.scheduler.timesteps[0])
    found = []
    for method in methods:
        recipe = on_grid(recipe_of(method), math.prod(grid))
        pipe.scheduler.set_timesteps(method.steps or settings.steps)
        counts = calls_of(recipe, [float(t) for t in pipe.scheduler.timesteps])
        costs = {Kind(): baseline, Kind(attention=FULL): baseline} | unit_costs(pipe, recipe, call)
        spent = [(costs[kind], count) for kind, count in counts.items()] + [(decoding, 1)]
        found.append(
            Seconds(sum(price.wall * n for price, n in spent), sum(price.cpu * n for price, n in spent))
        )
    return found
