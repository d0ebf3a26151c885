"""Tables on a terminal, and places to write to."""

from __future__ import annotations

import io
import re
from concurrent.futures import ThreadPoolExecutor
from operator import itemgetter
from pathlib import Path

import pytest
from agentsd_eval.files import check_writable
from agentsd_eval.pages.rows import Column, to_terminal
from rich.console import Console


@pytest.mark.parametrize("width", [60, 80, 200])
def test_a_narrow_terminal_cuts_no_figure(width: int) -> None:
    rows = [
        [f"a-method-with-a-name-as-long-as-this, at some setting={i}"] + [f"{i}1.25 ± 0.5"] * 5
        for i in (1, 2)
    ]
    console = Console(width=width, file=io.StringIO())
    heads = ["method", *(f"column {i}" for i in range(5))]
    columns = [Column(head, itemgetter(i)) for i, head in enumerate(heads)]
    console.print(to_terminal("figures", rows, columns))
    text = console.file.getvalue()
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    assert re.findall(r"[12]1\.25", text) == ["11.25"] * 5 + ["21.25"] * 5
    assert len(re.findall(r"\b0\.5\b", text)) == 10


def test_several_may_look_whether_a_place_is_writable(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(check_writable, [tmp_path / "run" / "table.jsonl"] * 500))
    assert not list((tmp_path / "run").iterdir())
