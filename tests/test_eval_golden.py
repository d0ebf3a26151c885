"""Golden files of table.md, latency.md and a report; `python tests/test_eval_golden.py` writes them anew."""

import json
import re
from pathlib import Path

import pytest
from agentsd_eval import run_file
from agentsd_eval.pages import cost_table, quality_table, report, rows

GOLDEN = Path(__file__).parent / "golden"
RUNS = {"table": Path(__file__).parents[1] / "eval/results/benchmark-demo", "latency": GOLDEN / "latency"}
SHOWN = ("baseline", "baseline@12", "fast", "paper", "agentsd", "tomesd", "real/real")
"""Methods of those runs that the golden files hold."""


def written(name, folder):
    """Write a result and its report from some committed rows; return the files' texts by their names."""
    run = run_file.read(RUNS[name])["results"][name]
    lines = (RUNS[name] / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    some = [row for row in map(json.loads, lines) if row["method"] in SHOWN]
    if name == "table":
        tables = quality_table.tables_of(some, run["settings"], run["clock"])
        note = quality_table.note(run["settings"]["features"])
    else:
        tables, note = cost_table.tables_of(some, run["clock"]), ""
    rows.write_rows(folder, name, some, tables, run, note)
    page = report.write_report(folder, 4).read_text(encoding="utf-8")
    body = re.sub(
        r"<svg.*?</svg>", "<svg/>", page.partition("<body>")[2].partition("<script>")[0], flags=re.S
    )
    table = (folder / f"{name}.md").read_text(encoding="utf-8")
    return {f"{name}.md": table, f"{name}_report.html": re.sub(r"\n\s*\n+", "\n", body).strip() + "\n"}


@pytest.mark.parametrize("name", RUNS)
def test_what_is_written_is_the_golden_file(name, tmp_path):
    for file, text in written(name, tmp_path).items():
        assert text == (GOLDEN / file).read_text(encoding="utf-8")


if __name__ == "__main__":
    import tempfile

    GOLDEN.mkdir(exist_ok=True)
    for result in RUNS:
        with tempfile.TemporaryDirectory() as place:
            for file, text in written(result, Path(place)).items():
                (GOLDEN / file).write_text(text, encoding="utf-8")
