"""An option of the command line for each setting, and back: what the options say as settings."""

from __future__ import annotations

import inspect
import types
import typing
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from pydantic.fields import FieldInfo

from .errors import EvalError
from .presets import parse_scalar
from .settings import CommandSettings, Option

_Config = Annotated[
    str | None,
    typer.Option(
        metavar="NAME|PATH",
        help="A preset's name (agentsd-eval --list-configs) or a YAML file; options override it.",
    ),
]


def options_of(kind: type[CommandSettings], with_config: bool) -> inspect.Signature:
    """Return an option or argument for each setting that has one, with its help and default."""
    parameters = []
    if with_config:
        parameters.append(_keyword("config", _Config, None))
    for key, field in kind.model_fields.items():
        option = next((mark for mark in field.metadata if isinstance(mark, Option)), None)
        value, many = value_kind(field)
        if key in kind.hidden or value is None:
            continue
        text = _help(kind, key)
        if option and option.positional:
            place = typer.Argument(help=text, metavar=option.name)
            parameters.append(_keyword(key, Annotated[value, place], inspect.Parameter.empty))
            continue
        name = f"--{option.name if option else key.replace('_', '-')}"
        flags = f"{name}/--no-{name[2:]}" if value is bool else name
        text = f"{text} [default: {_written(field.default)}]" if _written(field.default) else text
        asked = typer.Option(flags, help=text, metavar=_metavar(field))
        several: Any = list[value] if many else value  # type: ignore[valid-type]
        parameters.append(_keyword(key, Annotated[several | None, asked], None))
    return inspect.Signature(parameters)


def _keyword(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def value_kind(field: FieldInfo) -> tuple[Any, bool]:
    """Return the type of an option's value, None where a setting has no option, and whether it repeats."""
    kind = _plain(field.annotation)
    if typing.get_origin(kind) is tuple:
        return str, True  # so that "none" can be said, and numbers are read as in YAML
    if typing.get_origin(kind) is dict:
        return (str, True) if typing.get_args(kind)[1] is Any else (None, False)
    return (str if typing.get_origin(kind) is Literal else kind), False


def _plain(kind: Any) -> Any:
    """A type without None and annotations."""
    if typing.get_origin(kind) is Annotated:
        return _plain(typing.get_args(kind)[0])
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        return _plain(next(part for part in typing.get_args(kind) if part is not type(None)))
    return kind


def _metavar(field: FieldInfo) -> str | None:
    kind = _plain(field.annotation)
    if typing.get_origin(kind) is dict:
        return "KEY=VALUE"
    if typing.get_origin(kind) is tuple:
        kind = _plain(typing.get_args(kind)[0])
    if typing.get_origin(kind) is Literal:
        return "|".join(typing.get_args(kind))
    return {int: "INTEGER", float: "FLOAT", str: "TEXT", Path: "PATH"}.get(kind)


def _help(kind: type[CommandSettings], key: str) -> str:
    """A setting's docstring, its class's own or that of a class above."""
    fields = (getattr(above, "model_fields", {}).get(key) for above in kind.__mro__)
    found = next((field.description for field in fields if field and field.description), "")
    return " ".join(found.split())


def _written(value: Any) -> str:
    """A default as it is shown."""
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "" if value is None or not isinstance(value, str | int | float | Path) else str(value)


def settings_of(options: dict[str, Any], kind: type[CommandSettings]) -> dict[str, Any]:
    """Return the settings that options give: lists of texts as numbers where they are, pairs as a mapping."""
    given = {key: value for key, value in options.items() if value is not None and value != []}
    for key, value in given.items():
        if key == "agent":
            given[key] = parse_agent(value)
        elif isinstance(value, list):
            inner = _plain(typing.get_args(_plain(kind.model_fields[key].annotation))[0])
            if inner in (int, float):
                given[key] = () if value == ["none"] else [parse_scalar(number) for number in value]
    return given


def parse_agent(pairs: list[str]) -> dict[str, Any]:
    """Return {"k": 0.05} for ["k=0.05"]; values are read as YAML. Raises EvalError on a pair without "="."""
    values = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not value:
            raise EvalError(f"--agent {pair!r} must be KEY=VALUE, such as k=0.05")
        values[key] = parse_scalar(value)
    return values
