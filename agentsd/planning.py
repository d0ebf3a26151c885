"""Whether a run may cache: returns the run's plan, or the reason why nothing is cached."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from torch.nn import Module

from .foreign import foreign_inside, foreign_outside
from .memory import RunPlan
from .plan import FULL, FULL_CALL, Call, CallKind, ResidualSharing, plan_run
from .recipe import Recipe
from .run import Run
from .sampler import ImpulseResponse, Sampler, fingerprint, impulse_response, is_for_few_steps

FEWEST = 8
"""Least number of steps of a run that caches."""
Responses = dict[bytes, ImpulseResponse]
"""The last impulse response by its scheduler's fingerprint; the next run probably has the same timesteps."""


def plan_caching(
    recipe: Recipe, unet: Module, run: Run, call: Call, residual: ResidualSharing | None, known: Responses
) -> RunPlan | str:
    """Return the plan of a run from a call on, or the reason why nothing is skipped.

    Args:
        recipe: says what is to be cached.
        unet: the model.
        run: the run that the call belongs to.
        call: the run's first call, or the first after some timesteps were skipped.
        residual: how residuals of attention are shared at this size.
        known: the last response; it is used or replaced.
    """
    if run.guesses:
        return (
            "the run's steps are not known (pass elements of scheduler.timesteps to the U-Net, or apply "
            "agentsd to the pipeline)"
        )
    sampler = Sampler(run.scheduler, run.timesteps)
    ahead = range(len(run.timesteps))[call.index :: run.stride]
    steps = [sampler.step_of_call[index] for index in ahead]
    timesteps = [run.timesteps[index] for index in ahead]
    if reason := unsupported_reason(unet, len(set(steps)), run.scheduler, timesteps):
        return reason
    kinds = plan_run(recipe.steps, steps, residual)
    if all(kind in (FULL_CALL, CallKind(attention=FULL)) for kind in kinds):
        return RunPlan()
    response, remark = None, ""
    if recipe.steps is not None and recipe.steps.correct:
        response, remark = _response(unet, run, call, known)
    return RunPlan(dict(zip(ahead, kinds, strict=True)), call.index, run.stride, sampler, response, remark)


def unsupported_reason(unet: Any, count: int, scheduler: Any, timesteps: Sequence[float] = ()) -> str:
    """Return why nothing can be skipped in a run of `count` steps on these timesteps; "" if it can."""
    if any(later > earlier + 0.5 for earlier, later in pairwise(timesteps)):  # KDPM2 rounds every other one
        return (
            "the timesteps go up (an inversion, where what is cached loses much more, or no run of one image)"
        )
    if is_for_few_steps(scheduler):
        return f"{type(scheduler).__name__} is for few steps, none of which can be spared"
    if count < FEWEST:
        return f"a run of {count} steps has none to spare (fewer than {FEWEST})"
    if other := foreign_inside(unet):
        return f"{other}, which may have to see each call"
    return ""


def _response(unet: Module, run: Run, call: Call, known: Responses) -> tuple[ImpulseResponse | None, str]:
    """Return the sampler's response, if cached calls can be corrected by it, and what to tell the user."""
    scheduler, name = run.scheduler, type(run.scheduler).__name__
    if run.stride > 1:  # the sampler's steps don't lead from one call to the next
        return None, ""
    if scheduler is None:
        return None, (
            "the timesteps are not those of a scheduler that is known, so cached steps are not "
            "corrected; apply agentsd to the pipeline that runs"
        )
    if watcher := foreign_outside(unet):
        return None, f"{watcher}, which would see calls twice; cached steps are not corrected"
    key = fingerprint(scheduler) if call.begins else None  # in mid-run the sampler has a history
    response = known.get(key) if key is not None else None
    if response is None and (response := impulse_response(scheduler, call.index)) is None:
        return None, (
            f"{name} is not linear in what the U-Net gives (clip_sample, thresholding), or can't be "
            "stepped alone here, so cached steps are not corrected"
        )
    if key is not None:
        known.clear()
        known[key] = response
    noise = (
        f"{name} adds noise in each step, under which caching changes images more; a deterministic "
        "sampler loses less"
    )
    return response, noise if response.noisy else ""
