"""What a wheel holds."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_package_is_in_the_wheel():
    """An editable install would hide one that is not."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = []
    for name, folder in (("agentsd", "agentsd"), ("agentsd_eval", "eval")):
        inside = (path.parent.relative_to(ROOT / folder) for path in (ROOT / folder).rglob("__init__.py"))
        found += [".".join((name, *path.parts)) for path in inside]
    assert sorted(listed) == sorted([*found, "agentsd_eval.configs"])
