"""Measurements by name, each made once, in a file that a calibration goes on from."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from ..files import write_bytes


class Measurements:
    """Values that JSON can hold.

    Args:
        path: the file, a line for each value; None keeps none.
        of: what all values depend on.

    Raises:
        ValueError: the file can't be used, or is no calibration's.
    """

    def __init__(self, path: Path | None, of: Mapping[str, Any]) -> None:
        text = json.dumps(of, sort_keys=True, default=_in_short)
        self._path, self._of = path, sha256(text.encode()).hexdigest()[:16]
        self._known: dict[tuple[str, str], Any] = {}
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
            lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
            self._known = {(line["of"], line["name"]): line["value"] for line in lines}
        except OSError as error:
            raise ValueError(f"resume={str(path)!r}: {error.strerror}; pass a file's path") from None
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"resume={str(path)!r} is no calibration's: pass another file") from None

    def get(self, name: str, measure: Callable[[], Any]) -> Any:
        """The value of that name, measured now where it is not known."""
        key = self._of, name
        if key not in self._known:
            self._known[key] = measure()
            if self._path is not None:
                rows = ({"of": of, "name": n, "value": value} for (of, n), value in self._known.items())
                write_bytes(self._path, "".join(f"{json.dumps(row)}\n" for row in rows).encode())
        return self._known[key]


def _in_short(value: Any) -> str:
    """What stands for a tensor, an array or an image: a hash of its numbers; for others, their type."""
    numbers = np.asarray(value.detach().float().cpu() if isinstance(value, Tensor) else value)
    if numbers.dtype == object:
        return type(value).__name__
    return f"{numbers.shape} {sha256(numbers.tobytes()).hexdigest()[:16]}"
