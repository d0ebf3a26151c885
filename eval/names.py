"""What methods are called: a recipe's own name, or that of a rival."""

from __future__ import annotations

import re

NUMBERED = {"deepcache": 3, "tgate": 10, "forecast": 2}
"""Rivals that take a number, as in "deepcache-5", and the one that is meant where none is named."""
OTHERS = ("baseline", "tomesd", "todo", *NUMBERED, "limit", "limit-all")
"""Methods that are no recipe of this package."""


def is_method(name: str) -> bool:
    """Whether a method is called that, alone or joined with others."""
    from agentsd.recipe import MODES

    return name in OTHERS or name in MODES or numbered(name) is not None


def numbered(name: str) -> tuple[str, int] | None:
    """Return ("deepcache", 5) for "deepcache-5", ("deepcache", 3) for "deepcache", None for another name."""
    found = re.fullmatch(rf"({'|'.join(NUMBERED)})(?:-([1-9]\d{{0,2}}))?", name)
    return (found[1], int(found[2] or NUMBERED[found[1]])) if found else None
