"""README's table says what the committed results say, and its links lead somewhere."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "eval/results/gate-demo/table.jsonl"
SHOWN = {
    "stock": "stock, 25 steps",
    "stock@14": "stock, 14 steps",
    "reuse": '**`mode="reuse"`**',
    "deepcache-2": "DeepCache, interval 2",
    "fast r=0.4": '`mode="fast"`, the default',
    "downsample": "downsample (ToDo)",
    "tomesd r=0.4": "tomesd, ratio 0.4",
}


def table() -> str:
    """The README's table, from the results."""
    found = map(json.loads, RESULTS.read_text(encoding="utf-8").splitlines())
    rows = {row["label"]: row for row in found if "label" in row}
    lines = ["| | cost | distance x1000 | worth |", "|---|---|---|---|"]
    for label, name in SHOWN.items():
        row = rows[label]
        cost = row["multiply_adds"] / rows["stock"]["multiply_adds"]
        value, low, high = (1e3 * row[f"converged{end}"] for end in ("", "_low", "_high"))
        worth = ""
        if "worth_multiply_adds" in row:
            ends = (row[f"worth_multiply_adds{end}"] for end in ("", "_low", "_high"))
            sign = {"more": "> ", "less": "< "}.get(row["worth_multiply_adds_beyond"] or "", "")
            worth = sign + "{:.2f} ({:.2f}-{:.2f})".format(*ends)
        lines.append(f"| {name} | {cost:.2f} | {value:.0f} ({low:.0f}-{high:.0f}) | {worth} |")
    return "\n".join(lines)


def test_the_table_is_that_of_the_results() -> None:
    assert table() in (ROOT / "README.md").read_text(encoding="utf-8")


def test_it_is_read_in_a_minute() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 110
    assert len(re.sub(r"```.*?```|\|.*\|", "", text, flags=re.S).split()) <= 700


@pytest.mark.parametrize(
    "page", ["README.md", "CONTRIBUTING.md", *sorted(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md"))]
)
def test_links_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link]
    missing = [link for link in links if link and not ((ROOT / page).parent / link).exists()]
    assert not missing
