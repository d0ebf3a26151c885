"""The command `agentsd-dreambooth`, directly or through `accelerate launch -m agentsd.dreambooth`."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from .config import DreamBoothConfig, read_yaml


def dreambooth(config: Path | None = None, **options: Any) -> None:
    """Finetune a subject into Stable Diffusion with agent attention in every step."""
    given = {name: value for name, value in options.items() if value is not None}
    errors = Console(stderr=True)
    try:
        settings = DreamBoothConfig.model_validate((read_yaml(config) if config else {}) | given)
        from .training import Run

        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        with Progress(*columns) as progress:
            folder = Run(settings, progress).train()
    except ValidationError as error:
        for problem in error.errors():
            place = ".".join(map(str, problem["loc"])) or "settings"
            errors.print(f"error: {place}={problem.get('input')!r}: {problem['msg']}", markup=False)
        raise typer.Exit(2) from None
    except (OSError, ValueError) as error:
        errors.print(f"error: {error}", markup=False, soft_wrap=True)
        raise typer.Exit(2) from None
    Console().print(f"saved to {folder}; checkpoints and logs are beside it", soft_wrap=True)


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
    """Run the program (the script `agentsd-dreambooth`)."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(dreambooth)
    app()
