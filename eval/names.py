"""What methods are called: a recipe's own name, or that of a rival."""

from __future__ import annotations

import re

OTHERS = ("stock", "tomesd", "deepcache", "limit", "limit-all")
"""Methods that are no recipe of this package."""
_INTERVAL = 3  # of a deepcache that names none


def is_method(name: str) -> bool:
    """Whether a method is called that, alone or joined with others."""
    from agentsd.recipe import MODES

    return name in OTHERS or name in MODES or deepcache_interval(name) is not None


def deepcache_interval(name: str) -> int | None:
    """Return 5 for "deepcache-5", 3 for "deepcache", None for another name."""
    found = re.fullmatch(r"deepcache(?:-([1-9]\d{0,2}))?", name)
    return found and int(found[1] or _INTERVAL)
