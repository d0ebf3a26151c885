"""What a layer's attention runs in which steps: one operator in all of them, or others in the noisy ones."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from .attention import Operator, PooledAgents
from .checks import check, check_share, check_types


@dataclass(frozen=True)
class Phases:
    """One operator in the early, noisy steps and another in the later ones; None is full attention.

    Attributes:
        early, late: what runs.
        early_frac: share of the denoising steps that are early, in [0, 1].
    """

    early: Operator | None
    late: Operator | None
    early_frac: float = 0.4

    def __post_init__(self) -> None:
        check_types(self)
        check_share("early_frac", self.early_frac)
        _check_operators(early=self.early, late=self.late)
        same = f"early and late are both {self.early!r}: pass that alone, without Phases"
        if self.early == self.late:
            raise ValueError(same)

    @property
    def stages(self) -> tuple[Operator | None, ...]:
        """What runs in each stage of a run."""
        return self.early, self.late


@dataclass(frozen=True)
class ByDistance:
    """What runs by how far the latent moves in a step, for samplers that add noise, such as DDPM.

    From "Efficient Diffusion Transformer with Step-wise Dynamic Attention Mediators" (ECCV 2024), Eq. 11.

    Attributes:
        stages: what runs in each stage; None is full attention.
        thresholds: shares of the first distance at which the next stage begins, falling.
        per: one stage for the whole "batch", or for each "sample" (needs `PooledAgents` in each stage, which
            differ in their count alone).
    """

    stages: tuple[Operator | None, ...]
    thresholds: tuple[float, ...]
    per: str = "batch"

    def __post_init__(self) -> None:
        for name in ("stages", "thresholds"):
            value = getattr(self, name)
            check(name, value, isinstance(value, list | tuple), "pass a list or a tuple")
            object.__setattr__(self, name, tuple(value))
        for stage in self.stages:
            _check_operators(stages=stage)
        falls = list(self.thresholds) == sorted(self.thresholds, reverse=True)
        ok = falls and all(isinstance(x, float | int) and x >= 0 for x in self.thresholds)
        check("thresholds", self.thresholds, ok, "pass falling shares of the first distance, as (0.6, 0.3)")
        count = len(self.thresholds) + 1
        check("stages", self.stages, len(self.stages) == count, f"thresholds make {count}: name so many")
        check("stages", self.stages, len(set(self.stages)) > 1, "they are all the same: pass that alone")
        check("per", self.per, self.per in ("batch", "sample"), "choose 'batch' or 'sample'")
        if self.per == "sample":
            alike = {replace(s, count=None) if isinstance(s, PooledAgents) else s for s in self.stages}
            ok = len(alike) == 1 and isinstance(next(iter(alike)), PooledAgents)
            check(
                "stages", self.stages, ok, "per='sample' needs PooledAgents that differ in their count alone"
            )


Schedule: TypeAlias = Phases | ByDistance | Operator
"""What a layer runs; an operator alone runs in every step."""


def stages_of(schedule: Schedule | None) -> tuple[Operator | None, ...]:
    """What runs in each stage of a run."""
    return schedule.stages if isinstance(schedule, Phases | ByDistance) else (schedule,)


def timing_of(schedule: Schedule) -> tuple[Any, ...] | None:
    """When the stages of a schedule change; None for an operator alone."""
    if isinstance(schedule, Phases):
        return (schedule.early_frac,)
    return (schedule.thresholds, schedule.per) if isinstance(schedule, ByDistance) else None


def with_setting(schedule: Schedule | None, name: str, value: Any) -> Any:
    """A schedule with a setting changed wherever it has it."""
    if isinstance(schedule, Phases):
        early, late = (with_setting(stage, name, value) for stage in schedule.stages)
        early_frac = value if name == "early_frac" else schedule.early_frac
        return replace(schedule, early=early, late=late, early_frac=early_frac)
    if isinstance(schedule, ByDistance):
        return replace(schedule, stages=tuple(with_setting(stage, name, value) for stage in schedule.stages))
    return replace(schedule, **{name: value}) if hasattr(schedule, name) else schedule  # type: ignore[type-var]


def _check_operators(**named: object) -> None:
    for name, value in named.items():
        if value is not None and not isinstance(value, Operator):
            raise TypeError(f"{name}={value!r} is a {type(value).__name__}: pass an operator, as Agents()")
