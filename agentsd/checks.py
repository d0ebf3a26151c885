"""Checks of settings: each error names the value and the way out."""

from __future__ import annotations

import math
from dataclasses import fields
from numbers import Integral, Real
from typing import Any

_KINDS: dict[str, tuple[type, ...]] = {"str": (str,), "int": (Integral,), "float": (Real,), "bool": (bool,)}


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
            raise TypeError(f"{field.name}={value!r} is a {type(value).__name__}: pass a {kind}")
        if isinstance(value, Real) and kind == "float" and not math.isfinite(value):
            raise ValueError(f"{field.name}={value!r}: pass a finite number")


def check_share(name: str, value: float, *, below_one: bool = False) -> None:
    """Raise ValueError unless the value is in [0, 1], or in [0, 1)."""
    if below_one:
        check(name, value, 0 <= value < 1, "pass a share in [0, 1), for instance 0.4")
    else:
        check(name, value, 0 <= value <= 1, "pass a share in [0, 1], like 0.4")
