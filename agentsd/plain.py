"""Schedules and settings as the plain values of a file, and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
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
        return {"stages": stages, "thresholds": list(schedule.thresholds), "per": schedule.per}
    return write_settings(schedule)


def write_settings(settings: Any) -> dict[str, Any]:
    """{name: settings that are not the default}."""
    values = {f.name: (getattr(settings, f.name), f.default) for f in fields(settings)}
    return {settings.name: {name: value for name, (value, default) in values.items() if value != default}}


def plain_values(content: Any) -> Any:
    """The same without numpy's numbers, which YAML has none of."""
    if isinstance(content, Mapping):
        return {plain_values(key): plain_values(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [plain_values(value) for value in content]
    return content.item() if hasattr(content, "item") else content


def read_schedule(content: Any) -> Any:
    """A schedule of plain values: {agents: {ratio: 0.4}}, "full", or phases or stages of these."""
    if content is None or content == "full":
        return None
    if isinstance(content, dict) and "stages" in content:
        check_known(content, {"stages", "thresholds", "per"})
        stages = content["stages"]
        read = [read_schedule(stage) for stage in stages] if isinstance(stages, list) else stages
        return ByDistance(**content | {"stages": read})
    if isinstance(content, dict) and ("early" in content or "late" in content):
        check_known(content, {"early", "late", "early_frac"})
        return Phases(**content | {name: read_schedule(content.get(name)) for name in ("early", "late")})
    return read_settings(content, OPERATORS)


def read_settings(content: Any, kinds: Mapping[str, Any]) -> Any:
    """What a name and its settings say: {agents: {ratio: 0.4}}, or the name alone."""
    if isinstance(content, str):
        content = {content: {}}
    if not isinstance(content, dict):
        what = (
            "an operator, as `agents: {ratio: 0.4}`" if kinds is OPERATORS else "it, as `reuse: {every: 2}`"
        )
        raise ValueError(f"{content!r}: name {what}")
    [(name, settings), *more] = content.items() or [("", None)]
    if name not in kinds or more:
        raise ValueError(f"{list(content)}: name one of {', '.join(kinds)}")
    if not isinstance(settings or {}, dict):
        raise ValueError(f"{name}: {settings!r} is no mapping of its settings")
    check_known(settings or {}, {f.name for f in fields(kinds[name])})
    return kinds[name](**settings or {})


def check_known(content: Mapping[Any, Any], known: set[str]) -> None:
    """Raise ValueError for a key that is none of those known."""
    if unknown := [key for key in content if key not in known]:
        raise ValueError(f"{unknown[0]!r} is unknown; the settings are {', '.join(sorted(known))}")
