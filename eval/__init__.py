"""Quality and cost of agent attention beside its baselines: the program `agentsd-eval`."""

from typing import Any


def __getattr__(name: str) -> Any:
    """`agentsd_eval.calibrate`, loaded at its first use: it loads torch, which --help has no use for."""
    if name == "calibrate":
        from .calibration.search import calibrate

        return calibrate
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
