"""What a wheel holds."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_package_is_in_the_wheel():
    """An editable install would hide one that is not."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = [path.parent.relative_to(ROOT) for path in (ROOT / "agentsd").rglob("__init__.py")]
    assert sorted(listed) == sorted([*(".".join(path.parts) for path in found), "agentsd_eval"])
