"""The measurement cache: values by all that they depend on, in a file that a calibration goes on from."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

_BEGINNING = '{"key": '
"""Of each line."""


class Measurements:
    """Values that JSON can hold; each is measured once.

    Args:
        path: the file, a line for each value; None keeps none.
        of: what all values depend on, JSON-safe.
        progress: is called for each value that is asked for the first time.

    Raises:
        ValueError: the file can't be used, or is no calibration's.
    """

    def __init__(self, path: Path | None, of: Mapping[str, Any], progress: Callable[[], Any]) -> None:
        self._path, self._of, self._progress = path, json.dumps(of, sort_keys=True), progress
        self._known: dict[str, Any] = {}
        self._asked: set[str] = set()
        if path is None:
            return
        try:
            path.touch()
            complete, end, torn = path.read_text(encoding="utf-8", errors="replace").rpartition("\n")
            lines = complete.split("\n") if end else []
            if not all(line.startswith(_BEGINNING) for line in [*lines, *filter(None, [torn])]):
                raise ValueError(f"resume={str(path)!r} is no calibration's: pass another file")
            if torn:  # the last line of one that was killed
                path.write_text(complete + end, encoding="utf-8")
        except OSError as error:
            raise ValueError(f"resume={str(path)!r}: {error.strerror}; pass a file's path") from None
        try:
            self._known = {line["key"]: line["value"] for line in map(json.loads, lines)}
        except (ValueError, KeyError):
            raise ValueError(f"resume={str(path)!r} is damaged: pass another file, or remove it") from None

    def get(self, name: str, measure: Callable[[], Any]) -> Any:
        """The value of that name, measured now where it is not known."""
        key = sha256(f"{self._of} {name}".encode()).hexdigest()[:24]
        if key not in self._known:
            self._known[key] = measure()
            if self._path is not None:
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"key": key, "name": name, "value": self._known[key]}) + "\n")
        if key not in self._asked:
            self._asked.add(key)
            self._progress()
        return self._known[key]


def json_safe(value: Any) -> Any:
    """What says in a line that an argument of a call is the same: itself, or a hash of its numbers."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(name): json_safe(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_safe(item) for item in value]
    numbers = value.detach().float().cpu() if isinstance(value, Tensor) else value
    if isinstance(value, Tensor | np.ndarray) or hasattr(value, "__array_interface__"):
        return sha256(np.ascontiguousarray(numbers).tobytes()).hexdigest()[:16]
    return type(value).__name__
