"""The command line of `agentsd-eval`: an option for each setting; a command's code is loaded last."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from pydantic.fields import FieldInfo

from . import settings as s
from .errors import EvalError
from .presets import load_settings, parse_scalar, presets

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # its tables cut long names off
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
COMMANDS: dict[str, tuple[type[s.CommandSettings], str]] = {
    "compare": (s.CompareSettings, "studies.compare"),
    "table": (s.RunSettings, "studies.table"),
    "ablate": (s.AblateSettings, "studies.ablate"),
    "proof": (s.ProofSettings, "studies.proof"),
    "mediators": (s.MediatorSettings, "studies.mediators"),
    "redundancy": (s.RedundancySettings, "studies.redundancy"),
    "calibrate": (s.CalibrateSettings, "studies.calibration"),
    "subject": (s.SubjectSettings, "studies.subject"),
    "latency": (s.LatencySettings, "cost.latency"),
    "profile": (s.ProfileSettings, "cost.breakdown"),
    "fid": (s.FidSettings, "quality.fid"),
    "report": (s.ReportSettings, "pages.report"),
}
"""Each one's settings, and the module whose `command(settings, console)` does its work."""
_NO_CONFIG = ("fid", "report")
_RESUMED = ("table", "ablate", "proof", "mediators", "subject")
_Config = Annotated[
    str | None,
    typer.Option(
        metavar="NAME|PATH",
        help="A preset's name (agentsd-eval --list-configs) or a YAML file; options override it.",
    ),
]


def options_of(kind: type[s.CommandSettings], with_config: bool) -> inspect.Signature:
    """Return an option or argument for each setting that has one, with its help and default."""
    parameters = []
    if with_config:
        parameters.append(_keyword("config", _Config, None))
    for key, field in kind.model_fields.items():
        option = next((mark for mark in field.metadata if isinstance(mark, s.Option)), None)
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


def _help(kind: type[s.CommandSettings], key: str) -> str:
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


def settings_of(options: dict[str, Any], kind: type[s.CommandSettings]) -> dict[str, Any]:
    """Return the settings that options give: lists of texts as numbers where they are, pairs as a mapping."""
    given = {key: value for key, value in options.items() if value is not None and value != []}
    for key, value in given.items():
        if key == "agent":
            given[key] = parse_agent(value)
        elif isinstance(value, list):
            inner = _plain(typing.get_args(_plain(kind.model_fields[key].annotation))[0])
            numbers = inner in (int, float)
            given[key] = () if value == ["none"] else [parse_scalar(v) if numbers else v for v in value]
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


def _make(name: str) -> Callable[..., None]:
    kind, module = COMMANDS[name]

    @_clear_errors(name)
    def run(config: str | None = None, **options: Any) -> None:
        settings = load_settings(kind, config, settings_of(options, kind))
        # The libraries' remarks and bars would stand between a user and the table.
        for library in ("DIFFUSERS", "TRANSFORMERS"):
            os.environ.setdefault(f"{library}_VERBOSITY", "error")
        job = importlib.import_module(f".{module}", __package__)
        _hide_bars()
        from rich.console import Console

        job.command(settings, Console())

    run.__signature__ = options_of(kind, name not in _NO_CONFIG)  # type: ignore[attr-defined]
    run.__doc__ = kind.__doc__
    return run


def _clear_errors(name: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make an EvalError, a full GPU or Ctrl-C end a command with a message and an exit code."""

    def wrap(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def wrapped(*args: Any, **kwargs: Any) -> None:
            code = 2
            try:
                command(*args, **kwargs)
                return
            except EvalError as error:
                message = f"error: {error}"
            except ModuleNotFoundError as error:
                message = f"error: {explain_missing(error)}"
            except KeyboardInterrupt:
                way = "the same command goes on from here" if name in _RESUMED else "nothing was changed"
                message, code = f"stopped; {way}", 130
            except Exception as error:
                if type(error).__name__ != "OutOfMemoryError":
                    raise
                message = (
                    "error: the GPU's memory doesn't do; choose a smaller batch or size, or --dtype float16"
                )
            typer.echo(message, err=True)
            raise typer.Exit(code)

        return wrapped

    return wrap


def explain_missing(error: ModuleNotFoundError) -> str:
    """Return what to install for a package that is not there; raises the error if it is none of ours."""
    if error.name == "agentsd_demo":
        try:
            importlib.import_module("agentsd.demo")
        except ModuleNotFoundError as missing:
            return str(missing)
    if error.name not in ("DeepCache", "efficientnet_lite_pytorch", "jinja2", "matplotlib", "PIL", "tomesd"):
        raise error
    return f"{error.name} is not installed: pip install 'agentsd[eval]'"


def _hide_bars() -> None:
    for library in ("diffusers", "transformers"):
        if library in sys.modules:
            logging = importlib.import_module(f"{library}.utils.logging")
            logging.disable_progress_bar()


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        typer.echo(f"agentsd {version('agentsd')}")
        raise typer.Exit


def _list_configs(asked: bool) -> None:
    if asked:
        for name, (about, commands) in presets().items():
            typer.echo(f"{name}: {about}")
            for command in commands:
                typer.echo(f"    agentsd-eval {command} --config {name}")
        raise typer.Exit


@app.callback()
def start(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_version, help="Print it.")
    ] = False,
    list_configs: Annotated[
        bool,
        typer.Option(
            "--list-configs", is_eager=True, callback=_list_configs, help="List the presets for --config."
        ),
    ] = False,
) -> None:
    """Quality and cost of agent attention (AgentSD) beside stock Stable Diffusion, ToMeSD and DeepCache."""


for _name in COMMANDS:
    _run = _make(_name)
    app.command(_name, short_help=" ".join(str(_run.__doc__).partition("\n\n")[0].split()))(_run)


def main() -> None:
    """Run the program (the script `agentsd-eval`)."""
    app()


if __name__ == "__main__":
    main()
