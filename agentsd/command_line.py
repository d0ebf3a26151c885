"""A command line that is made of settings: each field of a pydantic model is an option, with its default."""

from __future__ import annotations

import difflib
import re
import types
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import click
from pydantic import BaseModel, ValidationError

_SHOWN = 120  # characters of a wrong value
_LONG, _MOST = 300, 1200
_WORD = re.compile(rf"\S{{{_LONG},}}")
_QUOTED = re.compile(rf"(?<!\w)(['\"])(?:(?!\1(?!\w)).){{{_LONG},}}\1(?!\w)", re.S)
_TOLD = {
    "int_parsing int_parsing_size int_from_float int_type": "pass a whole number",
    "float_parsing float_type": "pass a number",
    "bool_parsing bool_type": "pass true or false",
    "string_type": "pass text",
    "path_type": "pass a path",
    "tuple_type": "pass a list, as [a, b]",
    "dict_type": "pass `name: value` lines",
    "finite_number": "pass a finite number",
    "greater_than_equal": "pass {ge} or more",
    "greater_than": "pass more than {gt}",
    "less_than_equal": "pass {le} or less",
    "less_than": "pass less than {lt}",
    "multiple_of": "pass a multiple of {multiple_of}",
    "too_short": "pass at least {min_length}",
    "path_not_file": "there is no such file",
    "path_not_directory": "there is no such folder",
}
"""What is said of a wrong value in place of pydantic's words, by the type of its error."""


class SettingsCommand(click.Command):
    """A command whose options are the fields of its settings, in groups; the last has the others."""

    def __init__(
        self,
        name: str,
        kind: type[BaseModel],
        groups: Mapping[str, str],
        params: Sequence[click.Parameter],
        **attributes: Any,
    ) -> None:
        about = attributes.pop("help", None) or str(kind.__doc__)
        short = " ".join(about.partition("\n\n")[0].split())
        super().__init__(name, params=[*params], help=about, short_help=short, **attributes)
        self.kind, self.groups = kind, groups

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Keep the words as they were typed, for a run's file."""
        ctx.meta["words"] = list(args)
        with usage_in_a_line(ctx):
            return super().parse_args(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options in their groups."""
        groups: dict[str, list[tuple[str, str]]] = {name: [] for name in self.groups}
        group_of = {key: name for name, keys in self.groups.items() for key in keys.split()}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if isinstance(parameter, click.Argument):
                record = parameter.make_metavar(ctx), help_of(self.kind, str(parameter.name))
            if record is not None:
                groups[group_of.get(str(parameter.name), [*groups][-1])].append(record)
        for name, records in groups.items():
            if records:
                with formatter.section(name):
                    formatter.write_dl(records, col_max=24)


@contextmanager
def usage_in_a_line(ctx: click.Context) -> Iterator[None]:
    """Tell an unknown option or command in a line, and not under the usage."""
    try:
        yield
    except click.exceptions.NoArgsIsHelpError:  # whose message is the help
        raise
    except click.UsageError as error:
        told = shortened(error.format_message()).rstrip(".")
        click.echo(f"error: {told[0].lower()}{told[1:]} (see {ctx.command_path} --help)", err=True)
        raise SystemExit(error.exit_code) from None


def parameters_of(
    kind: type[BaseModel], hidden: Collection[str] = (), arguments: bool = True, join: str = "-"
) -> list[click.Parameter]:
    """Return an option for each setting; its value stays text, which the settings check.

    `arguments` says that required ones have no option's name. `join` stands between a name's words.
    """
    parameters: list[click.Parameter] = []
    for key, field in kind.model_fields.items():
        value = plain(field.annotation)
        if key in hidden:
            continue
        if field.is_required() and arguments:
            parameters.append(click.Argument([key], metavar=key.upper()))
            continue
        name = option_name(key, join)
        text = help_of(kind, key).partition(". ")[0].rstrip(".")
        if shown := "required" if field.is_required() else written(field.default):
            text += f" [{shown}]"
        flags = f"{name}/--no{join}{name[2:]}" if value is bool else name
        parameters.append(
            click.Option(
                [flags, key],
                help=text,
                metavar=None if value is bool else metavar_of(value),
                multiple=typing.get_origin(value) is tuple,
                default=None,
                is_flag=value is bool,
            )
        )
    return parameters


def option_name(key: str, join: str = "-") -> str:
    """Return the option of a setting."""
    return f"--{key.replace('_', join)}"


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
        return choices if len(choices) < 16 else "NAME"
    return {int: "N", float: "X", Path: "PATH"}.get(kind, "TEXT")


def help_of(kind: type[BaseModel], key: str) -> str:
    """Return a setting's docstring, its class's own or that of a class above."""
    fields = (getattr(above, "model_fields", {}).get(key) for above in kind.__mro__)
    return " ".join(next((f.description for f in fields if f and f.description), "").split())


def written(value: Any) -> str:
    """Return a default as it is shown."""
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value) if isinstance(value, str | int | float | Path) else ""


def settings_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that options give.

    Lists stand in one option, with commas, or in several; "none" is empty. A `--prompt` is taken whole.
    """
    given = {key: value for key, value in options.items() if value is not None and value != ()}
    for key, value in given.items():
        if isinstance(value, tuple) and key != "prompt":
            parts = [part for text in value for part in text.split(",")]
            given[key] = [] if parts == ["none"] else parts
    return given


def explain(
    kind: type[BaseModel], error: ValidationError, typed: Collection[str], file: Path | None, join: str = "-"
) -> list[str]:
    """Return a line for each wrong setting, by the name that it was given under: an option or a file's key.

    Of several faults of a setting the first is told. Settings that are missing stand in one line.
    """
    lines: list[str] = []
    missing: list[str] = []
    seen: set[str] = set()
    for problem in error.errors():
        first, *within = map(str, problem["loc"] or ("",))
        if first in seen or problem["type"] == "default_factory_not_called":  # it hangs on a wrong setting
            continue
        seen |= {first} - {""}
        option = first in typed and (join == "_" or not kind.model_fields[first].is_required())
        name = option_name(first, join) if option else first
        key = ".".join([name, *filter(str.isidentifier, within)])
        where = f"{file}: " if file and first not in typed and key else ""
        value = problem["input"]
        if problem["type"] == "missing":
            missing.append(option_name(first, join))
        elif problem["type"] == "extra_forbidden":
            near = difflib.get_close_matches(key, kind.model_fields, 1)
            way = f"did you mean {near[0]!r}?" if near else "--help lists the options, which are the keys"
            lines.append(f"{where}unknown key {key!r}; {way}")
        elif key and not isinstance(value, dict):  # whose own lines name what is wrong
            shown = str(value) if option and isinstance(value, str | Path) else repr(value)
            shown = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}..."
            lines.append(f"{where}{key} = {shown}: {told(problem)}")
        else:
            lines.append(f"{where}{told(problem)}")
    if missing:
        lines_of = f"lines of {file}" if file else "lines of a YAML file, with --config"
        each = "it" if len(missing) == 1 else "each"
        lines.append(f"{', '.join(missing)} missing: give {each} as an option, or as {lines_of}")
    return lines


def told(problem: Any) -> str:
    """Return what is wrong with a value, and the way out."""
    if problem["type"] == "literal_error":
        expected = problem["ctx"]["expected"].replace("'", "")
        given, digits = str(problem["input"]), re.compile(r"\D+")
        alike = [c for c in re.split(", | or ", expected) if digits.sub("", c) == digits.sub("", given)]
        near = difflib.get_close_matches(given, alike, 1, 0.5)  # fp16: float16; sd3 is no sdxl
        return f"{f'did you mean {near[0]}? ' if near else ''}choose {expected}"
    words = next((words for kinds, words in _TOLD.items() if problem["type"] in kinds.split()), None)
    return words.format(**problem.get("ctx", {})) if words else problem["msg"].removeprefix("Value error, ")


def shortened(message: str) -> str:
    """Return a message whose long words and quoted values have but their beginning and their end."""
    for long in (_QUOTED, _WORD):
        message = long.sub(lambda found: f"{found[0][:60]}...{found[0][-60:]}", message)
    half = _MOST // 2
    return message if len(message) <= _MOST else f"{message[:half]}...{message[-half:]}"
