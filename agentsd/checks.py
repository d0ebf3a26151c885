"""Checks of settings: each error names the value and the way out."""

from __future__ import annotations

import math
from dataclasses import fields
from numbers import Integral, Real
from typing import Any

_KINDS: dict[str, type] = {"str": str, "int": Integral, "float": Real, "bool": bool}
_WORDS = {"str": "a string", "int": "a whole number", "float": "a number", "bool": "True or False"}


def check(name: str, value: object, ok: bool, way_out: str) -> None:
    """Raise ValueError unless `ok`."""
    if not ok:
        raise ValueError(f"{name}={value!r}: {way_out}")


def check_types(settings: Any) -> None:
    """Raise TypeError for a field of a dataclass that is not what its annotation says.

    Only numbers, strings and truth values are looked at; a number that is not finite raises ValueError.
    """
    for field in fields(settings):
        value: Any = getattr(settings, field.name)
        kind = field.type.__name__ if isinstance(field.type, type) else str(field.type)
        if value is None and kind.endswith(" | None"):
            continue
        kind = kind.removesuffix(" | None")
        if kind not in _KINDS:
            continue
        if not isinstance(value, _KINDS[kind]) or (type(value) is bool and kind != "bool"):
            raise TypeError(f"{field.name}={value!r}: pass {_WORDS[kind]}")
        if isinstance(value, Real) and kind == "float" and not math.isfinite(value):
            raise ValueError(f"{field.name}={value!r}: pass a finite number")
