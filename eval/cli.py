"""The command line of `agentsd-eval`; a command's own code is loaded when it runs."""

from __future__ import annotations

import importlib
import os
import shlex
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

import click

from agentsd.command_line import SettingsCommand, parameters_of, settings_of, usage_in_a_line

from . import settings as s
from .errors import EvalError
from .presets import load_settings, presets

COMMANDS: dict[str, tuple[type[s.CommandSettings], str]] = {
    "compare": (s.CompareSettings, "studies.compare"),
    "table": (s.RunSettings, "studies.table"),
    "check": (s.CheckSettings, "studies.check"),
    "calibrate": (s.CalibrateSettings, "studies.calibration"),
    "latency": (s.LatencySettings, "studies.latency"),
    "fid": (s.FidSettings, "studies.fid"),
    "report": (s.ReportSettings, "pages.report"),
}
"""Each one's settings, and the module whose `command(settings, console)` does its work."""
GROUPS = {
    "Model": "model dtype device offload arch backend compile",
    "Sampling": "prompt prompts classes scheduler steps guidance_scale height width sizes "
    "seed images batch_size batches",
    "Methods": "methods ratio ratios fewer_steps samplers calibrated recipe",
    "References": "reference references reference_steps features clip dino",
    "Output and measurement": "",
}
"""Settings under each head of a command's help; the last one has the others."""


class Program(click.Group):
    """The commands in their own order; an error ends one with a message and an exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands as they were given."""
        return list(self.commands)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the program's own options."""
        with usage_in_a_line(ctx):
            return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Read a command's options, and run it."""
        with usage_in_a_line(ctx):
            return super().invoke(ctx)


def make_program(
    name: str, commands: Mapping[str, tuple[type[s.CommandSettings], str]], about: str
) -> Program:
    """Return a program of these commands."""
    program = Program(
        name,
        help=about,
        no_args_is_help=True,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
        params=[
            click.Option(["--version"], is_flag=True, is_eager=True, callback=_version, help="Print it."),
            click.Option(
                ["--list-configs"],
                is_flag=True,
                is_eager=True,
                callback=_list_configs,
                help="List the presets for --config.",
            ),
        ],
        callback=lambda **options: None,
    )
    for command, (kind, module) in commands.items():
        about_config = "A preset (agentsd-eval --list-configs) or a YAML file."
        options: list[click.Parameter] = parameters_of(kind, kind.hidden)
        if issubclass(kind, s.Settings):
            options.insert(0, click.Option(["--config"], metavar="NAME|FILE", help=about_config))
        callback = partial(_run, kind, module)
        heads = GROUPS if issubclass(kind, s.Settings) else {"Folders": "folder first second", "Options": ""}
        program.add_command(SettingsCommand(command, kind, heads, options, callback=callback))
    return program


def _typed(context: click.Context) -> str:
    """Return the command that runs; of several processes with a launcher, whose own words can't be seen."""
    program, count = context.command_path.split(), s.processes()
    if count > 1:
        program = ["accelerate", "launch", "--num_processes", str(count), *program[program[0] == "python" :]]
    return shlex.join([*program, *context.meta["words"]])


def _run(kind: type[s.CommandSettings], module: str, config: str | None = None, **options: Any) -> None:
    """Do a command's work; an EvalError, a full GPU or Ctrl-C end it with a message and an exit code."""
    try:
        _check_alone(kind)
        # Threads that spin while they wait take the cores from those that work: 7 times the time beside
        # another busy program. OpenMP reads this when torch is loaded.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        # The libraries' remarks and bars would stand between a user and the table.
        for library in ("DIFFUSERS", "TRANSFORMERS"):
            os.environ.setdefault(f"{library}_VERBOSITY", "error")
        settings = load_settings(kind, config, settings_of(options))
        settings._command = _typed(click.get_current_context())
        job = importlib.import_module(f".{module}", __package__)
        for library in ("diffusers", "transformers"):
            if library in sys.modules:
                importlib.import_module(f"{library}.utils.logging").disable_progress_bar()
        from rich.console import Console

        # Redirected, a row of a table is a line, however long.
        job.command(settings, Console(width=None if sys.stdout.isatty() else 500))
        return
    except EvalError as error:
        message, code = "\n".join(f"error: {line}" for line in str(error).splitlines()), 2
    except ModuleNotFoundError as error:
        message, code = f"error: {explain_missing(error)}", 2
    except KeyboardInterrupt:
        resumed = "goes on from here" if kind.resumes else "begins anew"
        message, code = f"stopped; the same command {resumed}", 130
    except Exception as error:
        if type(error).__name__ != "OutOfMemoryError":
            raise
        message, code = "error: the GPU has too little memory; ", 2
        if kind.resumes:
            message += "the same command goes on from here with a smaller --batch-size; else "
        message += "choose a smaller batch or size, or --dtype float16"
    click.echo(message, err=True)
    raise SystemExit(code)


def _check_alone(kind: type[s.CommandSettings]) -> None:
    """Raise EvalError where each of several processes would do all of a command's work."""
    if not kind.shares and (count := s.processes()) > 1:
        raise EvalError(
            f"{count} processes: this command is one process's, and each would do all of it; start it "
            "without accelerate launch"
        )


def explain_missing(error: ModuleNotFoundError) -> str:
    """Return what to install for a package that is not there; raises the error if it is none of ours."""
    if (error.name or "").partition(".")[0] == "agentsd_demo":
        try:
            importlib.import_module("agentsd.demo")
        except ModuleNotFoundError as missing:
            return str(missing)
    raise error


def _version(ctx: click.Context, option: click.Parameter, asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        click.echo(f"agentsd-eval {version('agentsd-eval')}")
        ctx.exit()


def _list_configs(ctx: click.Context, option: click.Parameter, asked: bool) -> None:
    if asked:
        for name, preset in presets().items():
            click.echo(f"{name}: {preset['about']}")
            for command in preset["commands"]:
                click.echo(f"    agentsd-eval {command} --config {name}")
        ctx.exit()


main = make_program(
    "agentsd-eval",
    COMMANDS,
    "Quality and cost of the modes agentsd (agent attention) and fast (step caching) beside the baseline, "
    f"ToMeSD, ToDo and DeepCache. Without --out, commands write to {s.RESULTS}/ in the working folder.",
)

if __name__ == "__main__":
    main()
