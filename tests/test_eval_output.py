"""Tables on a terminal."""

from __future__ import annotations

import io
import re

import pytest
from agentsd_eval.output import make_table
from rich.console import Console


@pytest.mark.parametrize("width", [60, 80, 200])
def test_a_narrow_terminal_cuts_no_figure(width: int) -> None:
    rows = [
        [f"a-method-with-a-name-as-long-as-this, at some setting={i}"] + [f"{i}1.25 ± 0.5"] * 5
        for i in (1, 2)
    ]
    console = Console(width=width, file=io.StringIO())
    console.print(make_table("figures", ["method", *(f"column {i}" for i in range(5))], rows))
    text = console.file.getvalue()
    assert max(map(len, text.splitlines())) <= width
    assert re.findall(r"[12]1\.25", text) == ["11.25"] * 5 + ["21.25"] * 5
    assert len(re.findall(r"\b0\.5\b", text)) == 10
