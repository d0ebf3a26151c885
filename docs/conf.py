"""The documentation site: `sphinx-build -W -c docs . dist/site`. Its source is the whole repository, so that
the links that work in a checkout work on the site, and are checked there."""

import re
from pathlib import Path
from typing import Any

project = "AgentSD for diffusers"
project_copyright = "the agentsd authors"
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "docs/index"
include_patterns = [
    "docs/**",
    "notebooks/*.ipynb",
    "eval/results/**",
    "demo/agentsd_demo/MODEL_CARD.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
]
exclude_patterns = [
    ".*",
    "agentsd",
    "agentsd-results",
    "configs",
    "dist",
    "docs/_root",
    "outputs",
    "runs",
    "tests",
]
suppress_warnings = ["toc.not_included"]  # raw tables, which pages link to one by one

myst_heading_anchors = 3
nb_execution_mode = "off"  # the notebooks' outputs are committed; CI executes them apart
nb_render_markdown_format = "myst"  # tables in them are tables
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_use_ivar = True

smartquotes = False  # two dashes are an option's

html_theme = "furo"
html_title = "AgentSD for diffusers"
html_extra_path = ["_root"]
html_static_path = ["_static"]
html_css_files = ["tables.css"]

COMMANDS = ("compare", "table", "check", "calibrate", "latency", "fid", "report")
"""The commands of `agentsd-eval` that the reference explains, in this order."""


def _options(command: Any) -> list[str]:
    """A command's section: what it does, and its options with their help."""
    from agentsd.command_line import help_of, written

    rows = []
    for option in command.params:
        if option.name == "help":
            continue
        names = [*option.opts, *option.secondary_opts]
        if option.param_type_name == "argument":
            names = [str(option.metavar or option.name)]
        text = help_of(command.kind, option.name) if option.name != "config" else option.help
        text = text.replace("|", "\\|")
        if shown := option.name != "config" and written(command.kind.model_fields[option.name].default):
            text += f" [{shown}]"
        rows.append(f"| {', '.join(f'`{name}`' for name in names)} | {text} |")
    about = " ".join((command.help or "").split())
    return [f"## agentsd-eval {command.name}", about, "\n".join(["| option | |", "|---|---|", *rows])]


def _command_line() -> str:
    """Every command's section, from the settings that the command line itself is made from."""
    from agentsd_eval.cli import main

    return "\n\n".join(part for name in COMMANDS for part in _options(main.commands[name]))


def _first_screen() -> str:
    """The README down to its installation, with links as they are from docs/."""
    text = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    text = text.partition("\n## Install\n")[0].partition("\n")[2]
    return re.sub(r"\]\((?!https?:|#)(docs/)?", lambda m: "](" if m[1] else "](../", text)


def _fill(app: Any, name: str, source: list[str]) -> None:
    """A table of figures is called by its folder; two pages get what is made from elsewhere."""
    if name.startswith("eval/results/") and not source[0].startswith("# "):
        source[0] = f"# {Path(name).parent.name}\n\n{source[0]}"
    if name == "docs/index":
        mark = "<!-- the README's first screen: docs/conf.py puts it here -->"
        source[0] = source[0].replace(mark, _first_screen())
    if name == "docs/reference/command_line":
        source[0] = f"{source[0]}\n{_command_line()}\n"


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("source-read", _fill)
