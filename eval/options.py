"""The command line of a command, made of its settings: an option for each, in groups, with its default."""

from __future__ import annotations

import types
import typing
from pathlib import Path
from typing import Annotated, Any, Literal

import click

from .settings import CommandSettings, Settings

GROUPS = {
    "Arguments": "folder first second",
    "Model": "model dtype device arch backend compile",
    "Sampling": "prompt prompts classes scheduler steps guidance_scale height width sizes "
    "seed images batch_size batches",
    "Methods": "methods ratio ratios fewer_steps samplers calibrated recipe",
    "References": "reference references reference_steps features clip dino",
    "Output and measurement": "",
}
"""Settings under each head of a command's help; the last one has the others."""


class SettingsCommand(click.Command):
    """A command whose options are the fields of its settings."""

    def __init__(self, name: str, kind: type[CommandSettings], **attributes: Any) -> None:
        about = str(kind.__doc__)
        short = " ".join(about.partition("\n\n")[0].split())
        super().__init__(name, params=parameters_of(kind), help=about, short_help=short, **attributes)
        self.kind = kind

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Keep the words as they were typed, for a run's file."""
        ctx.meta["words"] = list(args)
        return super().parse_args(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options in their groups."""
        groups: dict[str, list[tuple[str, str]]] = {name: [] for name in GROUPS}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if isinstance(parameter, click.Argument):
                record = parameter.make_metavar(ctx), help_of(self.kind, str(parameter.name))
            if record is not None:
                group = next(
                    (g for g, keys in GROUPS.items() if parameter.name in keys.split()), [*GROUPS][-1]
                )
                groups[group].append(record)
        for name, records in groups.items():
            if records:
                with formatter.section(name):
                    formatter.write_dl(records, col_max=24)


def parameters_of(kind: type[CommandSettings]) -> list[click.Parameter]:
    """Return an argument or option for each setting; its value stays text, which the settings check."""
    parameters: list[click.Parameter] = []
    if issubclass(kind, Settings):
        about = "A preset (agentsd-eval --list-configs) or a YAML file."
        parameters.append(click.Option(["--config"], metavar="NAME|FILE", help=about))
    for key, field in kind.model_fields.items():
        value = plain(field.annotation)
        many = typing.get_origin(value) is tuple
        if key in kind.hidden:
            continue
        if field.is_required():
            parameters.append(click.Argument([key], metavar=key.upper()))
            continue
        name = f"--{key.replace('_', '-')}"
        text = help_of(kind, key).partition(". ")[0].rstrip(".")
        if shown := written(field.default):
            text += f" [{shown}]"
        flags = f"{name}/--no-{name[2:]}" if value is bool else name
        parameters.append(
            click.Option(
                [flags, key],
                help=text,
                metavar=None if value is bool else metavar_of(value),
                multiple=many,
                default=None,
                is_flag=value is bool,
            )
        )
    return parameters


def plain(kind: Any) -> Any:
    """Return a type without None and annotations."""
    if typing.get_origin(kind) is Annotated:
        return plain(typing.get_args(kind)[0])
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        return plain(next(part for part in typing.get_args(kind) if part is not type(None)))
    return kind


def metavar_of(kind: Any) -> str:
    """Return what stands for an option's value: its kind, or the choices."""
    if typing.get_origin(kind) is tuple:
        inner = metavar_of(plain(typing.get_args(kind)[0]))
        return inner if "|" in inner else f"{inner},..."
    if typing.get_origin(kind) is Literal:
        choices = "|".join(typing.get_args(kind))
        return choices if len(choices) < 20 else "NAME"
    return {int: "N", float: "X", Path: "PATH"}.get(kind, "TEXT")


def help_of(kind: type[CommandSettings], key: str) -> str:
    """Return a setting's docstring, its class's own or that of a class above."""
    fields = (getattr(above, "model_fields", {}).get(key) for above in kind.__mro__)
    return " ".join(next((f.description for f in fields if f and f.description), "").split())


def written(value: Any) -> str:
    """Return a default as it is shown."""
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value) if isinstance(value, str | int | float | Path) else ""


def settings_of(options: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that options give.

    Lists stand in one option, with commas, or in several; "none" is empty. A `--prompt` is taken whole.
    """
    given = {key: value for key, value in options.items() if value is not None and value != ()}
    for key, value in given.items():
        if isinstance(value, tuple) and key != "prompt":
            parts = [part for text in value for part in text.split(",")]
            given[key] = [] if parts == ["none"] else parts
    return given
