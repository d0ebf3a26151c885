"""The command line of `agentsd-eval`; a command's own code is loaded when it runs."""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer

from . import settings as s
from .errors import EvalError
from .options import options_of, settings_of
from .presets import load_settings, presets

COMMANDS: dict[str, tuple[type[s.CommandSettings], str]] = {
    "compare": (s.CompareSettings, "studies.compare"),
    "table": (s.RunSettings, "studies.table"),
    "ablate": (s.AblateSettings, "studies.ablate"),
    "check": (s.CheckSettings, "studies.check"),
    "calibrate": (s.CalibrateSettings, "studies.calibration"),
    "subject": (s.SubjectSettings, "studies.subject"),
    "latency": (s.LatencySettings, "studies.latency"),
    "report": (s.ReportSettings, "pages.report"),
    "app": (s.AppSettings, "studies.app"),
}
"""Each one's settings, and the module whose `command(settings, console)` does its work."""
_NO_CONFIG = ("fid", "report", "details")
_RESUMED = ("table", "ablate", "metric-validation", "check", "mediators", "calibrate", "subject")


def _make(name: str, kind: type[s.CommandSettings], module: str) -> Callable[..., None]:
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
                way = "goes on from here" if name in _RESUMED else "begins anew"
                message, code = f"stopped; the same command {way}", 130
            except Exception as error:
                if type(error).__name__ != "OutOfMemoryError":
                    raise
                message = "error: the GPU's memory doesn't do; "
                if name in _RESUMED:
                    message += "the same command goes on from here with a smaller --batch-size; else "
                message += "choose a smaller batch or size, or --dtype float16"
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
    if error.name != "gradio":
        raise error
    return "gradio is not installed: pip install 'agentsd[app]'"


def _hide_bars() -> None:
    for library in ("diffusers", "transformers"):
        if library in sys.modules:
            logging = importlib.import_module(f"{library}.utils.logging")
            logging.disable_progress_bar()


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        typer.echo(f"agentsd-eval {version('agentsd-eval')}")
        raise typer.Exit


def _list_configs(asked: bool) -> None:
    if asked:
        for name, (about, commands) in presets().items():
            typer.echo(f"{name}: {about}")
            for command in commands:
                typer.echo(f"    agentsd-eval {command} --config {name}")
        raise typer.Exit


def _start(
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
    pass


def make_app(commands: Mapping[str, tuple[type[s.CommandSettings], str]], about: str) -> typer.Typer:
    """Return a program of these commands."""
    app = typer.Typer(
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,  # its tables cut long names off
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback(help=about)(_start)
    for name, (kind, module) in commands.items():
        run = _make(name, kind, module)
        app.command(name, short_help=" ".join(str(run.__doc__).partition("\n\n")[0].split()))(run)
    return app


app = make_app(
    COMMANDS,
    "Quality and cost of agent attention (AgentSD) beside baseline Stable Diffusion, ToMeSD and DeepCache.",
)


def main() -> None:
    """Run the program (the script `agentsd-eval`)."""
    app()


if __name__ == "__main__":
    main()
