"""Imports in the evaluation go one way, those inside functions too."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "eval"
BASE = {"errors", "names", "settings"}
MAY_IMPORT = {
    "errors": set(),
    "names": set(),
    "settings": {"errors", "names"},
    "presets": BASE,
    "pages": BASE,
    "pictures": BASE | {"pages"},
    "cost": BASE | {"pages", "pictures"},
    "quality": BASE | {"pages", "pictures"},
    "studies": BASE | {"pages", "pictures", "cost", "quality"},
    "options": BASE | {"presets"},
    "cli": BASE | {"presets", "options"},
}


def wings_imported(path: Path) -> set[str]:
    """The wings, or files beside them, that a module imports with leading dots."""
    inside = path.parent != ROOT
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level == 1 + inside:
            names = [node.module.split(".")[0]] if node.module else [alias.name for alias in node.names]
            found |= set(names)
    return found


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_no_import_runs_back_up(path: Path) -> None:
    wing = path.relative_to(ROOT).parts[0].removesuffix(".py")
    assert wings_imported(path) <= MAY_IMPORT.get(wing, set())
