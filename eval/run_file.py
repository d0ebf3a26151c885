"""run.json, the file that says once what a folder's images and figures depend on, and who made them."""

import json
from pathlib import Path
from typing import Any

from .errors import EvalError
from .files import write_bytes

NAME = "run.json"
FORMAT = 3
"""Of the file."""


def read(folder: Path) -> dict[str, Any]:
    """Return what the file holds, {} where there is none: `images`, `environments` and `results`.

    Raises EvalError where it can't be read, or is of an earlier program.
    """
    path = folder / NAME
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise EvalError(f"can't read {path}: {error}; remove it if the folder is no run's") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise EvalError(
            f"{path} is no run's of this program: an earlier one began it, or it was edited; "
            "choose another --out"
        )
    return found


def update(folder: Path, **parts: dict[str, Any]) -> None:
    """Add entries to the file's parts."""
    found = {"format": FORMAT} | read(folder)
    for name, entries in parts.items():
        found[name] = found.get(name, {}) | entries
    write_bytes(folder / NAME, json.dumps(found, indent=1, ensure_ascii=False).encode())
