"""Writes the figures of README and docs from the results they are of: `python docs/figures.py`.

A figure stands between `<!--=ROW KIND-->` and `<!--=-->`, and a table between `<!--=table NAME-->` and that.
tables.yaml has the tables. `<!-- figures of RUN -->` names the folder of eval/results whose rows those after
it are read from.
tests/test_readme.py fails where a page and the results differ.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from statistics import NormalDist
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "demo/agentsd_demo/MODEL_CARD.md", *sorted((ROOT / "docs").glob("*.md"))]
_RUN = re.compile(r"<!-- figures of (\S+) -->")
_MARKED = re.compile(r"(<!--=([^>]+?) ([\w-]+?)-->)(.*?)(<!--=-->)", re.S)

Z95 = NormalDist().inv_cdf(0.975)
"""Half the width of a 95% interval, in standard errors."""
Row = dict[str, Any]
Rows = dict[str, Row]


def _base(row: Row, rows: Rows) -> Row:
    """Baseline in as many steps."""
    _, at, steps = row["label"].partition("@")
    return rows[f"baseline{at}{steps}"]


def _range(row: Row, name: str, form: str, scale: float = 1.0) -> str:
    value, low, high = (format(scale * row[f"{name}{end}"], form) for end in ("", "_low", "_high"))
    return f"{value} ({low}-{high})"


def _gain(by: str) -> Callable[[Row, Rows], str]:
    def gain(row: Row, rows: Rows) -> str:
        if f"gain_{by}" not in row:
            return ""
        sign = {"more": "> ", "less": "< "}.get(row[f"gain_{by}_beyond"] or "", "")
        return sign + _range(row, f"gain_{by}", ".2f")

    return gain


def _share(name: str) -> Callable[[Row, Rows], str]:
    return lambda row, rows: f"{row[name]:.0%}"


def _pictures(measure: str) -> Callable[[Row, Rows], str]:
    """How many pictures show a link: intervals narrow with the square root of their number, here 32."""

    def pictures(row: Row, rows: Rows) -> str:
        value, low, high = (row[measure][name] for name in ("value", "low", "high"))
        if measure != "kid":
            value, low, high = map(math.log, (value, low, high))
        if value <= 0:
            return "-"
        needed = max(2, math.ceil(32 * ((high - low) / 2 / value) ** 2 - 1e-9))
        return f"{needed:,}" if needed <= 5000 else "> 5,000"

    return pictures


def _change(name: str, scale: float, form: str) -> Callable[[Row, Rows], str]:
    """A change against the baseline and half of its 95% interval."""

    def change(row: Row, rows: Rows) -> str:
        value, half = scale * row[f"{name}_change"], scale * Z95 * row[f"{name}_change_error"]
        return f"{value:+{form}} ± {half:{form}}"

    return change


def _kept(row: Row, rows: Rows) -> str:
    """Whether the far ends of both distributions' distances are below those of 12 steps."""
    twelve = rows["baseline@12"]
    far = {
        name: row[f"{name}_change"] + Z95 * row[f"{name}_change_error"] - twelve[f"{name}_change"]
        for name in ("kid", "fd")
    }
    return "yes" if max(far.values()) < 0 else "no"


KINDS: dict[str, Callable[[Row, Rows], str]] = {
    "cost": lambda row, rows: f"{row['macs'] / rows['baseline']['macs']:.2f}",
    "cheaper": lambda row, rows: f"{_base(row, rows)['macs'] / row['macs']:.2f}x",
    "cheaper-than-baseline": lambda row, rows: f"{rows['baseline']['macs'] / row['macs']:.2f}x",
    "saved": lambda row, rows: f"{1 - row['macs'] / rows['baseline']['macs']:.0%}",
    "faster": lambda row, rows: f"{row['speedup']:.2f}x",
    "distance": lambda row, rows: f"{1e3 * row['reference_distance']:.3g}",
    "distance-range": lambda row, rows: _range(row, "reference_distance", ".0f", 1e3),
    "gain": _gain("macs"),
    "gain-seconds": _gain("seconds"),
    "gain-value": lambda row, rows: f"{row['gain_macs']:.2f}",
    "to-baseline": lambda row, rows: f"{1e3 * row['baseline_distance']:.3g}",
    "kid": lambda row, rows: f"{1e3 * row['kid']:.3g}",
    "kid-change": lambda row, rows: f"{1e3 * row['kid_change']:+.3g}",
    "kid-95": _change("kid", 1e3, ".1f"),
    "seeds-95": lambda row, rows: (
        _change("kid_seeds", 1e3, ".1f")(row, rows) if "kid_seeds_change" in row else ""
    ),
    "fd-95": _change("fd", 1, ".2f"),
    "kept": _kept,
    "shown-perceptual": _pictures("to reference image"),
    "shown-kid": _pictures("kid"),
    "place": lambda row, rows: f"{row['place']:.1f}",
    "size": lambda row, rows: f"{row['size']:.1f}",
    "images": lambda row, rows: str(row["images"]),
    **{
        name: _share(f"right_{name}")
        for name in ("seen", "heldout_triple", "heldout_pair", "style", "colour")
    },
    **{
        f"{name}_count": lambda row, rows, name=name: str(row[f"right_{name}_count"])
        for name in ("seen", "heldout_triple", "heldout_pair")
    },
}

TABLES: dict[str, dict[str, dict[str, str]]] = yaml.safe_load(
    (ROOT / "docs/tables.yaml").read_text(encoding="utf-8")
)


@cache
def rows_of(run: str) -> Rows:
    """The rows of a run's table by their labels, real pictures' as real/real; of a proof by its pairs."""
    (path,) = (ROOT / "eval/results" / run).glob("*.jsonl")
    rows = list(map(json.loads, path.read_text(encoding="utf-8").splitlines()))
    if path.stem == "proof":
        return _links(rows)
    return {row.get("label", row["method"]): row for row in rows}


def _links(rows: list[Row]) -> Rows:
    """A row for each pair of losses, "LESS < MORE", with its links by measure."""
    links: Rows = {}
    for row in rows:
        pair = f"{row['less']} < {row['more']}".replace("-sdpa", "")
        links.setdefault(pair, {})[row["measure"]] = row
    return links


def table(rows: Rows, name: str) -> str:
    """A Markdown table."""
    columns, wanted = TABLES[name]["columns"], TABLES[name]["rows"]
    lines = [f"| | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for head, label in wanted.items():
        lines.append(f"| {head} | {' | '.join(KINDS[k](rows[label], rows) for k in columns.values())} |")
    return "\n" + "\n".join(lines) + "\n"


def written(text: str) -> str:
    """A page's text with its figures as the results have them."""
    runs = [(named.start(), named[1]) for named in _RUN.finditer(text)]

    def fill(match: re.Match[str]) -> str:
        start, label, kind, _, end = match.groups()
        rows = rows_of([run for place, run in runs if place < match.start()][-1])
        return start + (table(rows, kind) if label == "table" else KINDS[kind](rows[label], rows)) + end

    return _MARKED.sub(fill, text)


def unmarked(text: str) -> str:
    """A page's text without what stands between marks."""
    return _MARKED.sub("", text)


if __name__ == "__main__":
    for page in PAGES:
        before = page.read_text(encoding="utf-8")
        if (after := written(before)) != before:
            page.write_text(after, encoding="utf-8")
            print(page.relative_to(ROOT))
