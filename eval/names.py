"""What methods are called, read before torch is loaded: a mode or another package's method, two joined by
"+", in steps of its own after "@", under a sampler of its own after "/"."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, get_args

MODES = ("agentsd", "fast")
"""Those of `agentsd.recipe.MODES`, which loads torch."""
METHODS: dict[str, int | None] = {
    "baseline": None,
    "tomesd": None,
    "todo": None,
    "deepcache": 3,
    "spectrum": 2,
    "easycache": 20,
    "no-attention": None,
    "no-attention-all": None,
}
"""Methods that are no recipe of this package; for those that take a number ("deepcache-5"), the default."""
BOUNDS = "no-attention", "no-attention-all"
"""Of METHODS, those that aren't offered: they leave attention out, to bound what any attention can save."""
ELSEWHERE = "ucache", "teacache", "sada", "tgate"
"""Other packages' methods that aren't here."""
_OnKarrasLevels = Literal["dpm++karras", "dpm++3karras", "unipckarras", "deiskarras", "sasolverkarras"]
Sampler = Literal["plms", "ddim", "ddpm", "euler", "dpm++", _OnKarrasLevels]
SAMPLERS: tuple[str, ...] = get_args(Sampler)


@dataclass(frozen=True)
class Name:
    """A method's name in its parts; the baseline has none."""

    parts: tuple[str, ...]
    steps: int | None = None
    sampler: str | None = None


def is_method(name: str) -> bool:
    """Whether a method is called that, alone or joined with others."""
    return name in METHODS or name in MODES or numbered(name) is not None


def numbered(name: str) -> tuple[str, int] | None:
    """Return ("deepcache", 5) for "deepcache-5", ("deepcache", 3) for "deepcache", None for another name."""
    found = re.fullmatch(r"([a-z]+)(?:-([1-9]\d{0,2}))?", name)
    default = found and METHODS.get(found[1])
    return (found[1], int(found[2] or default)) if found and default else None


def read(text: str, own: Collection[str] = ()) -> Name:
    """Return the parts of a name such as "agentsd+deepcache", "baseline@20" or "fast/unipckarras".

    `own` are names of the user's. Raises ValueError on an unknown name, and on what can't be combined.
    """
    whole, slash, sampler = text.partition("/")
    if slash and sampler not in SAMPLERS:
        raise ValueError(f"{text!r}: after the / stands a sampler, one of {', '.join(SAMPLERS)}")
    joined, at, steps = whole.partition("@")
    if at and not re.fullmatch(r"[1-9]\d{0,2}|1000", steps):
        raise ValueError(f"{text!r}: after the @ stands a number of steps, as in baseline@20")
    parts = () if joined == "baseline" else tuple(joined.split("+"))
    unknown = [part for part in parts if part == "baseline" or not (part in own or is_method(part))]
    if unknown:
        if unknown[0].lower().replace("-", "") in ELSEWHERE:
            raise ValueError(
                f"{unknown[0]!r} is no method here; docs/how_to/coming_from.md compares it with what there is"
            )
        names = [*(name for name in METHODS if name not in BOUNDS), *MODES, *own]
        near = difflib.get_close_matches(unknown[0], names, 1)
        meant = f"did you mean {near[0]}? " if near else ""
        within = f" in {text!r}" if text != unknown[0] else ""
        raise ValueError(
            f"unknown method {unknown[0]!r}{within}; {meant}use {', '.join(names)}, "
            "a composition such as agentsd+deepcache, or fewer steps such as baseline@20"
        )
    beside = sum((numbered(part) or ("",))[0] == "deepcache" for part in parts)
    if beside > 1 or len(parts) - beside > 1:
        raise ValueError(f"{text!r} can't be combined: name one method, and deepcache beside it at most")
    return Name(parts, int(steps) if at else None, sampler or None)
