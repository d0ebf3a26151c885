"""Schedules and settings as the plain values of a file, and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from .attention import Agents, Downsample, Merge, Operator, PooledAgents
from .modules import AgentModule, AttnZero, FocusedLinear
from .schedule import ByDistance, Phases, Schedule

_KINDS = (Agents, PooledAgents, Merge, Downsample, AgentModule, FocusedLinear, AttnZero)
OPERATORS: dict[str, type[Operator]] = {kind.name: kind for kind in _KINDS}
"""By their names in a file; add one's own here to read and write it."""


def write_schedule(schedule: Schedule | None) -> Any:
    """Plain values of a schedule: a mapping of an operator's name to its settings, or of stages of these."""
    if schedule is None:
        return "full"
    if isinstance(schedule, Phases):
        early, late = map(write_schedule, schedule.stages)
        return {"early": early, "late": late, "early_frac": schedule.early_frac}
    if isinstance(schedule, ByDistance):
        stages = [write_schedule(stage) for stage in schedule.stages]
        return {"stages": stages, "thresholds": list(schedule.thresholds)}
    return write_settings(schedule)


def write_settings(settings: Any) -> dict[str, Any]:
    """{name: settings that are not the default}."""
    return {settings.name: write_changed(settings)}


def write_changed(settings: Any) -> dict[str, Any]:
    """The settings that are not the default."""
    values = {f.name: (getattr(settings, f.name), f.default) for f in fields(settings)}
    return {name: value for name, (value, default) in values.items() if value != default}


def changed_text(settings: Any) -> str:
    """A dataclass as it would be written in Python, with what differs from its defaults alone."""
    if isinstance(settings, tuple):
        return f"({', '.join(map(changed_text, settings))})"
    if not is_dataclass(settings):
        return repr(settings)
    told = [f"{name}={changed_text(value)}" for name, value in write_changed(settings).items() if value != {}]
    return f"{type(settings).__name__}({', '.join(told)})"


def read_schedule(content: Any) -> Any:
    """A schedule of plain values: {agents: {ratio: 0.4}}, "full", or phases or stages of these."""
    if content is None or content == "full":
        return None
    if isinstance(content, dict) and "stages" in content:
        check_known(content, {"stages", "thresholds"})
        stages = content["stages"]
        read = [read_schedule(stage) for stage in stages] if isinstance(stages, list) else stages
        return ByDistance(**content | {"stages": read})
    if isinstance(content, dict) and ("early" in content or "late" in content):
        check_known(content, {"early", "late", "early_frac"})
        return Phases(**content | {name: read_schedule(content.get(name)) for name in ("early", "late")})
    return _read_operator(content)


def _read_operator(content: Any) -> Operator:
    """What a name and its settings say: {agents: {ratio: 0.4}}, or the name alone."""
    if isinstance(content, str):
        content = {content: {}}
    if not isinstance(content, dict):
        raise ValueError(f"{content!r}: name an operator, as `agents: {{ratio: 0.4}}`")
    [(name, settings), *more] = content.items() or [("", None)]
    if name not in OPERATORS or more:
        raise ValueError(f"{list(content)}: name one of {', '.join(OPERATORS)}")
    operator: Operator = read_settings(name, {} if settings is None else settings, OPERATORS[name])
    return operator


def read_settings(name: str, content: Any, kind: Any) -> Any:
    """Settings of a kind: {interval: 2}; an empty mapping is all defaults."""
    known = [f.name for f in fields(kind)]
    if not isinstance(content, dict):
        example = f"{{{known[0]}: {getattr(kind, known[0])!r}}}" if known else "{}"
        raise ValueError(f"{name}: {content!r} is no mapping of its settings, such as {example}")
    try:
        check_known(content, set(known))
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    return kind(**content)


def check_known(content: Mapping[Any, Any], known: set[str]) -> None:
    """Raise ValueError for a key that is none of those known."""
    if unknown := [key for key in content if key not in known]:
        raise ValueError(f"{unknown[0]!r} is unknown; the settings are {', '.join(sorted(known))}")
