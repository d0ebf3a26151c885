"""What every calibration asks before its first run: a goal, prompts, and a U-Net that nothing holds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ..hosts import find_model


def check_goal(*, speedup: float | None, **losses: float | None) -> None:
    """Raise ValueError unless there is one goal: a speed-up above 1, or a largest loss, by its name."""
    [(name, largest)] = losses.items()
    if (speedup is None) == (largest is None):
        raise ValueError(f"speedup={speedup}, {name}={largest}: give one goal, the one or the other")
    if speedup is not None and not 1 < speedup < math.inf:
        raise ValueError(f"speedup={speedup}: pass more than 1, for instance 1.15")
    if largest is not None and not 0 < largest < math.inf:
        raise ValueError(f"{name}={largest}: pass more than 0, for instance 0.001")


def check_prompts(prompts: Sequence[str]) -> None:
    """Raise ValueError for anything but a list of prompts."""
    if not prompts or isinstance(prompts, str):
        raise ValueError(f"prompts={prompts!r}: pass a list of a few that are like the ones to come")


def check_cost(cost: str) -> None:
    """Raise ValueError for an unknown cost."""
    if cost not in ("time", "multiply_adds"):
        raise ValueError(f"cost={cost!r}: choose 'time' or 'multiply_adds'")


def free_unet(pipe: Any) -> Any:
    """The pipeline's U-Net; raises TypeError if there is none, ValueError if it is patched or compiled."""
    if not callable(pipe) or not hasattr(pipe, "unet"):
        raise TypeError(f"{type(pipe).__name__} is no pipeline with a `unet`, to be run on the prompts")
    unet = find_model(pipe)
    if unet is not pipe.unet or unet._compiled_call_impl is not None:
        raise ValueError("the U-Net is compiled: calibrate first, and compile it afterwards")
    if hasattr(unet, "_agentsd"):
        raise ValueError("the pipeline is patched: call remove_agentsd(pipe) first")
    return unet
