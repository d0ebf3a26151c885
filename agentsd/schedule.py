"""What a layer's attention runs in which steps: one operator in all of them, or others in the noisy ones."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from .attention import Operator
from .attention.operator import check_operator
from .by_distance import ByDistance
from .checks import check_share, check_types


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
        for name, operator in (("early", self.early), ("late", self.late)):
            check_operator(name, operator)
        same = f"early and late are both {self.early!r}: pass that alone, without Phases"
        if self.early == self.late:
            raise ValueError(same)

    @property
    def stages(self) -> tuple[Operator | None, ...]:
        """What runs in each stage of a run."""
        return self.early, self.late


Schedule: TypeAlias = Phases | ByDistance | Operator
"""What a layer runs; an operator alone runs in every step."""


def stages_of(schedule: Schedule | None) -> tuple[Operator | None, ...]:
    """What runs in each stage of a run."""
    return schedule.stages if isinstance(schedule, Phases | ByDistance) else (schedule,)


def with_setting(schedule: Schedule | None, name: str, value: Any) -> Any:
    """A schedule with a setting changed wherever it has it."""
    if isinstance(schedule, Phases):
        early, late = (with_setting(stage, name, value) for stage in schedule.stages)
        early_frac = value if name == "early_frac" else schedule.early_frac
        return replace(schedule, early=early, late=late, early_frac=early_frac)
    if isinstance(schedule, ByDistance):
        return replace(schedule, stages=tuple(with_setting(stage, name, value) for stage in schedule.stages))
    return replace(schedule, **{name: value}) if hasattr(schedule, name) else schedule  # type: ignore[type-var]
