"""The documentation site: `sphinx-build -W -c docs . dist/site`. Its source is the whole repository, so that
the links that work in a checkout work on the site, and are checked there."""

from pathlib import Path
from typing import Any

project = "agentsd"
project_copyright = "the agentsd authors"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "docs/index"
include_patterns = [
    "docs/*.md",
    "eval/results/**",
    "demo/agentsd_demo/MODEL_CARD.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
]
exclude_patterns = [".*", "agentsd", "configs", "dist", "outputs", "runs", "tests"]
suppress_warnings = ["toc.not_included"]  # figures, which pages link to one by one

myst_heading_anchors = 3
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_use_ivar = True

html_theme = "furo"
html_title = "agentsd"
html_extra_path = ["_root"]


def _give_title(app: Any, name: str, source: list[str]) -> None:
    """A table of figures is called by its folder."""
    if name.startswith("eval/results/") and not source[0].startswith("# "):
        source[0] = f"# {Path(name).parent.name}\n\n{source[0]}"


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("source-read", _give_title)
