"""What methods are called: a recipe's own name, or that of another package's method."""

from __future__ import annotations

import re

METHODS: dict[str, int | None] = {
    "baseline": None,
    "tomesd": None,
    "todo": None,
    "deepcache": 3,
    "no-attention": None,
    "no-attention-all": None,
}
"""Methods that are no recipe of this package; for those that take a number ("deepcache-5"), the default."""


def is_method(name: str) -> bool:
    """Whether a method is called that, alone or joined with others."""
    from agentsd.recipe import MODES

    return name in METHODS or name in MODES or numbered(name) is not None


def numbered(name: str) -> tuple[str, int] | None:
    """Return ("deepcache", 5) for "deepcache-5", ("deepcache", 3) for "deepcache", None for another name."""
    found = re.fullmatch(r"([a-z]+)(?:-([1-9]\d{0,2}))?", name)
    default = found and METHODS.get(found[1])
    return (found[1], int(found[2] or default)) if found and default else None
