"""What the commands share: the program they belong to, its errors, and how options become settings."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import typer
from rich.console import Console

from .errors import EvalError
from .pages import output

app = typer.Typer(no_args_is_help=True, add_completion=False)
console = Console()


def clear_errors(command: Callable[..., None]) -> Callable[..., None]:
    """Wrap a command so that an EvalError, or a full GPU, ends it with a message and exit code 2."""

    @functools.wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except EvalError as error:
            message = str(error)
        except torch.OutOfMemoryError:
            message = "the GPU's memory doesn't do; choose a smaller batch or size, or --dtype float16"
        else:
            return
        Console(stderr=True).print(f"[red]error:[/] {output.escape(message)}", soft_wrap=True)
        raise typer.Exit(2)

    return wrapped


def given(options: dict[str, Any]) -> dict[str, Any]:
    """Return the settings among a command's options; they have the settings' names."""
    arguments = {"config", "what", "first", "second"}
    settings = {key: value for key, value in options.items() if key not in arguments}
    if "agent" in settings:
        settings["agent"] = parse_agent(settings["agent"])
    return settings


def parse_agent(pairs: list[str] | None) -> dict[str, Any] | None:
    """Return {"k": 0.05} for ["k=0.05"]; values are read as YAML. Raises EvalError on a pair without "="."""
    if not pairs:
        return None
    values = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not value:
            raise EvalError(f"--agent {pair!r} must be KEY=VALUE, such as k=0.05")
        values[key] = output.read_scalar(value)
    return values
