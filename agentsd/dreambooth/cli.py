"""The options of `agentsd-dreambooth`, and what is said when they are wrong."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import OutOfMemoryError

from .config import DreamBoothConfig
from .yaml_file import read_mapping

_SHOWN = 120  # characters of a wrong value


def make_command(**defaults: Any) -> Callable[..., None]:
    """The command, with these settings where neither a file nor an option has others."""

    def command(config: Path | None = None, dry_run: bool = False, **options: Any) -> None:
        """Finetune a subject into Stable Diffusion with agent attention in every step."""
        given = {name: value for name, value in options.items() if value is not None}
        errors = Console(stderr=True, soft_wrap=True, markup=False, highlight=False)
        try:
            read = read_mapping(config) if config else {}
            settings = DreamBoothConfig.model_validate(defaults | read | given)
            for line in _dry(settings) if dry_run else _train(settings):
                Console(soft_wrap=True, markup=False, highlight=False).print(line)
        except ValidationError as error:
            for line in _explain(error, config, given):
                errors.print(f"error: {line}")
            raise typer.Exit(2) from None
        except OSError as error:
            told = f"{error.filename}: {error.strerror}" if error.filename else " ".join(str(error).split())
            errors.print(f"error: {told}")
            raise typer.Exit(2) from None
        except (ValueError, FloatingPointError) as error:
            errors.print(f"error: {error}")
            raise typer.Exit(2) from None
        except OutOfMemoryError as error:
            errors.print(
                f"error: {' '.join(str(error).split())[:200]}; --dry_run says what a step takes, and what "
                "takes less; a run with a checkpoint goes on with --resume_from_checkpoint latest"
            )
            raise typer.Exit(2) from None

    command.__signature__ = _signature(defaults)  # type: ignore[attr-defined]
    return command


def _train(settings: DreamBoothConfig) -> list[str]:
    from .training import Run

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns) as progress:
        run = Run(settings, progress)
        run.accelerator.print(f"{len(run.instance)} images of the subject")
        folder = run.train()
    grid = "grid.png and " if (folder / "grid.png").exists() else ""
    return [f"saved to {folder}; {grid}checkpoints are beside it"]


def _dry(settings: DreamBoothConfig) -> list[str]:
    from .memory import report

    return report(settings)


def _explain(error: ValidationError, config: Path | None, given: dict[str, Any]) -> list[str]:
    """A line for each wrong setting, and one for all that are missing."""
    lines, missing = [], []
    for problem in error.errors():
        place, told = ".".join(map(str, problem["loc"])), problem["msg"].removeprefix("Value error, ")
        option = f"--{place}" if place in given or config is None else f"{config}: {place}"
        if problem["type"] == "missing":
            missing.append(f"--{place}")
        elif problem["type"] == "extra_forbidden":
            lines.append(f"{option}: there is no such setting; --help lists them")
        else:
            value = repr(problem["input"])
            shown = value if len(value) <= _SHOWN else f"{value[:_SHOWN]}..."
            lines.append(f"{option}={shown}: {told}" if place else told)
    if missing:
        where = f"or as lines of {config}" if config else "or as lines of a YAML file, with --config"
        lines.append(f"{', '.join(missing)} missing: give each as an option, {where}")
    return lines


def _signature(defaults: dict[str, Any]) -> inspect.Signature:
    """One option for each setting, named as it is, so that no name or default stands in two places."""

    def option(name: str, kind: Any, default: Any, flag: str, text: str) -> inspect.Parameter:
        asked = Annotated[kind, typer.Option(flag, help=text)]
        return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=asked)

    parameters = [
        option("config", Path | None, None, "--config", "YAML of settings; options override it."),
        option("dry_run", bool, False, "--dry_run", "Only say how much memory a step takes, and if it fits."),
    ]
    for name, setting in DreamBoothConfig.model_fields.items():
        kind: Any = setting.annotation
        flag = f"--{name}/--no_{name}" if kind in (bool, bool | None) else f"--{name}"
        default = defaults.get(name, setting.default)
        told = "required" if setting.is_required() else "" if default is None else f"default: {default}"
        text = f"{setting.description} ({told})" if told else str(setting.description)
        parameters.append(option(name, kind | None, None, flag, text))
    return inspect.Signature(parameters)


dreambooth, dreambooth_lora = make_command(), make_command(rank=4)


def main(command: Callable[..., None] = dreambooth) -> None:
    """Read the options and train."""
    # Boxes would cut the options' names where the terminal is narrow.
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command()(command)
    app()
