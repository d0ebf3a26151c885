"""What was measured, by name: kept in a file, so that a calibration that was stopped goes on from there."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor


class Measurements:
    """Values by name, which JSON can hold; each is measured once.

    Args:
        path: the file, which begins with `of` and has a line for each value; None keeps none.
        of: what the values depend on, JSON-safe.
        progress: gets how many of how many are measured.

    Raises:
        ValueError: the file can't be used, is none of a calibration, or is of something else.
    """

    def __init__(
        self, path: Path | None, of: Mapping[str, Any], progress: Callable[[int, int], None]
    ) -> None:
        self._path, self._progress = path, progress
        self._known: dict[str, Any] = {}
        self._asked: set[str] = set()
        self._total = 0
        if path is not None:
            try:
                self._open(path, json.loads(json.dumps(of)))
            except OSError as error:
                raise ValueError(f"resume={str(path)!r}: {error.strerror}; pass a file's path") from None

    def _open(self, path: Path, of: dict[str, Any]) -> None:
        text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
        complete, _, torn = text.rpartition("\n")
        if not complete:
            if torn and not torn.startswith('{"of"'):
                raise ValueError(f"resume={str(path)!r} is no calibration's: pass another file")
            path.write_text(json.dumps({"of": of}) + "\n", encoding="utf-8")
            return
        try:
            head, *lines = [json.loads(line) for line in complete.split("\n")]
            self._known = {line["name"]: line["value"] for line in lines}
            was, now = _flat(head["of"]), _flat(of)
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(f"resume={str(path)!r} is no calibration's: pass another file") from None
        for name in {**was, **now}:
            if was.get(name) != now.get(name):
                raise ValueError(
                    f"resume={str(path)!r} was begun with {name}={was.get(name)!r}, here it is "
                    f"{now.get(name)!r}: pass another file, or remove this one"
                )
        if torn:  # the last line of one that was killed
            path.write_text(complete + "\n", encoding="utf-8")

    def expect(self, count: int) -> None:
        """At most so many will be asked for."""
        self._total = count

    def get(self, name: str, measure: Callable[[], Any]) -> Any:
        """The value of that name, measured now where it is not known."""
        if name not in self._known:
            text = json.dumps({"name": name, "value": measure()})
            if self._path is not None:
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(text + "\n")
            self._known[name] = json.loads(text)["value"]
        if name not in self._asked:
            self._asked.add(name)
            self._progress(len(self._asked), max(self._total, len(self._asked)))
        return self._known[name]

    def finish(self) -> None:
        """All is there."""
        self._progress(len(self._asked), len(self._asked))


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Mappings inside as "name.inner"."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat |= {f"{name}.{inner}": item for inner, item in _flat(value).items()}
        else:
            flat[name] = value
    return flat


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
