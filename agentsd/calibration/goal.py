"""What calibration asks before its first run: a goal, prompts, and a U-Net that calls can be spared of."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ..attention import Operator
from ..cache import StepCache
from ..cache.suited import why_uncached
from ..checks import check, check_share
from ..hosts.models import EVERY_LEVEL, find_model, find_sites
from ..hosts.schedulers import Sampler
from ..patch import apply_agentsd
from ..recipe import Recipe

_OWN = ("timesteps", "sigmas", "generator", "output_type", "prompt")


def check_goal(speedup: float | None, max_distance: float | None) -> None:
    """Raise ValueError unless there is one goal: a speed-up above 1, or a largest distance above 0."""
    if (speedup is None) == (max_distance is None):
        raise ValueError(
            f"speedup={speedup}, max_distance={max_distance}: give one goal, the one or the other"
        )
    if speedup is not None:
        check("speedup", speedup, 1 < speedup < math.inf, "pass more than 1, for instance 1.8")
    if max_distance is not None:
        ok = 0 < max_distance < math.inf
        check("max_distance", max_distance, ok, "pass more than 0, for instance 0.05")


def check_arguments(
    prompts: Sequence[str],
    held_out: Sequence[str],
    cost: str,
    operators: Sequence[Operator],
    early_frac: float,
    call_kwargs: dict[str, Any],
) -> None:
    """Raise ValueError for what `calibrate` can't do with."""
    way_out = "pass a list of a few that are like the ones to come"
    check("prompts", prompts, bool(prompts) and not isinstance(prompts, str), way_out)
    check("held_out", held_out, not isinstance(held_out, str), "pass a list of prompts, or leave it out")
    if both := sorted(set(prompts) & set(held_out)):
        raise ValueError(f"held_out={both}: they are among the prompts, pass others")
    check("cost", cost, cost in ("time", "macs"), "choose 'time' or 'macs'")
    for operator in operators:
        check("operators", operator, isinstance(operator, Operator), "pass operators, as [Downsample()]")
        untrained = not operator.needs_core
        check("operators", operator, untrained, "it is to be trained; only what runs without is calibrated")
    check_share("early_frac", early_frac)
    for name in _OWN:
        if name in call_kwargs:
            raise ValueError(f"{name}={call_kwargs[name]!r}: leave it out, calibration sets it itself")


def free_unet(pipe: Any, operators: Sequence[Operator], num_inference_steps: int) -> Any:
    """The pipeline's U-Net.

    Raises TypeError if there is none; ValueError if it is patched, compiled or offloaded layer by layer, a
    layer can't be patched, or no call of such a run can be spared.
    """
    if not all(hasattr(pipe, name) for name in ("unet", "scheduler", "set_progress_bar_config")):
        raise TypeError(f"{type(pipe).__name__} is no pipeline with a `unet`, to be run on the prompts")
    unet = find_model(pipe)
    if unet is not pipe.unet or unet._compiled_call_impl is not None:
        raise ValueError("the U-Net is compiled: calibrate first, and compile it afterwards")
    if any(parameter.device.type == "meta" for parameter in unet.parameters()):
        raise ValueError("the U-Net's weights are kept elsewhere by sequential offloading: calibrate first")
    if hasattr(unet, "_agentsd"):
        raise ValueError("the pipeline is patched: call remove_agentsd(pipe) first")
    layers = None
    if operators:
        layers = {site.name: operators[0] for site in find_sites(unet, EVERY_LEVEL, at_most=True)}
    apply_agentsd(
        unet, recipe=Recipe(layers=layers, steps=StepCache())
    ).remove()  # raises what it would later
    if reason := why_uncached(unet, num_inference_steps, Sampler(pipe.scheduler, ())):
        raise ValueError(f"nothing can be skipped in these runs: {reason}")
    return unet
