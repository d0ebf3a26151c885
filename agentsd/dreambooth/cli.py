"""The options of `agentsd-dreambooth`, and what is said when they are wrong."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from .config import DreamBoothConfig
from .yaml_file import read_mapping

_SHOWN = 120  # characters of a wrong value


def dreambooth(config: Path | None = None, **options: Any) -> None:
    """Finetune a subject into Stable Diffusion with agent attention in every step."""
    given = {name: value for name, value in options.items() if value is not None}
    errors = Console(stderr=True, soft_wrap=True, markup=False, highlight=False)
    try:
        read = read_mapping(config) if config else {}
        settings = DreamBoothConfig.model_validate(read | given)
        from .training import Run

        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        with Progress(*columns) as progress:
            folder = Run(settings, progress).train()
    except ValidationError as error:
        for line in _explain(error, config, given):
            errors.print(f"error: {line}")
        raise typer.Exit(2) from None
    except OSError as error:
        errors.print(f"error: {error.filename}: {error.strerror}" if error.filename else f"error: {error}")
        raise typer.Exit(2) from None
    except ValueError as error:
        errors.print(f"error: {error}")
        raise typer.Exit(2) from None
    Console().print(f"saved to {folder}; checkpoints and logs are beside it", soft_wrap=True)


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


def _signature() -> inspect.Signature:
    """One option for each setting, named as it is, so that no name or default stands in two places."""
    parameters = [
        inspect.Parameter(
            "config",
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[
                Path | None, typer.Option("--config", help="YAML of settings; options override it.")
            ],
        )
    ]
    for name, setting in DreamBoothConfig.model_fields.items():
        flag = f"--{name}/--no_{name}" if setting.annotation is bool else f"--{name}"
        default = "required" if setting.is_required() else f"default: {setting.default}"
        text = f"{setting.description} ({default})" if setting.description else f"({default})"
        kind: Any = setting.annotation
        parameters.append(
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=None,
                annotation=Annotated[kind | None, typer.Option(flag, help=text)],
            )
        )
    return inspect.Signature(parameters)


dreambooth.__signature__ = _signature()  # type: ignore[attr-defined]


def main() -> None:
    """Read the options and train."""
    # Boxes would cut the options' names where the terminal is narrow.
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command()(dreambooth)
    app()
