"""Imports in the evaluation go one way, those inside functions too."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1] / "eval"
BASE = {"errors", "names", "settings", "files", "run_file", "environment", "log", "intervals"}
WINGS = BASE | {"pages", "images", "cost", "quality", "calibration", "studies"}
MAY_IMPORT = {
    "__init__": {"calibration"},
    "errors": set(),
    "log": set(),
    "names": set(),
    "intervals": set(),
    "settings": {"files", "names"},
    "files": {"errors"},
    "run_file": {"errors", "files"},
    "environment": {"settings"},
    "presets": BASE,
    "pages": BASE,
    "images": BASE,
    "cost": BASE | {"images"},
    "quality": BASE | {"images"},
    "calibration": BASE | {"cost", "images"},
    "studies": WINGS | {"presets"},
    "cli": BASE | {"presets"},
    "research": WINGS | {"cli"},
}
"""Costs, quality and pages know nothing of each other; no import runs back up."""


def wings_imported(path):
    """The wings, or files beside them, that a module imports with leading dots."""
    inside = path.parent != ROOT
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level == 1 + inside:
            names = [node.module.split(".")[0]] if node.module else [alias.name for alias in node.names]
            found |= set(names)
    return found


def test_imports_go_one_way():
    wrong = {}
    for path in sorted(ROOT.rglob("*.py")):
        wing = path.relative_to(ROOT).parts[0].removesuffix(".py")
        if more := wings_imported(path) - MAY_IMPORT.get(wing, set()):
            wrong[str(path.relative_to(ROOT))] = more
    assert not wrong
