"""What is written: tables, progress, files, and a page of what can be read."""

import io
import json
import math
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from operator import itemgetter
from pathlib import Path

import pytest
from agentsd_eval.errors import EvalError
from agentsd_eval.files import check_own_image, check_writable, save_image
from agentsd_eval.pages.report import write_report
from agentsd_eval.pages.rows import Column, cells, figure, to_markdown, to_terminal, write_rows
from PIL import Image
from rich.console import Console

from agentsd.progress import progress


@pytest.mark.parametrize("width", [60, 80, 200])
def test_a_narrow_terminal_cuts_no_figure(width):
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


def test_several_may_look_whether_a_place_is_writable(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(check_writable, [tmp_path / "run" / "table.jsonl"] * 500))
    assert not list(tmp_path.iterdir())


def test_an_image_of_the_users_is_not_written_over(tmp_path):
    photo = tmp_path / "photo.png"
    Image.new("RGB", (8, 8)).save(photo)
    for path in (photo, tmp_path / "subject.txt"):
        path.touch()
        with pytest.raises(EvalError, match="was not made by this command and stays as it is"):
            check_own_image(path)
    save_image(Image.new("RGB", (8, 8)), tmp_path / "compared.png")
    check_own_image(tmp_path / "compared.png")
    check_own_image(tmp_path / "none.png")


def test_without_a_terminal_progress_is_a_line_a_minute(monkeypatch, capsys):
    now, out = 0.0, io.StringIO()
    monkeypatch.setattr("agentsd.progress.time.monotonic", lambda: now)
    for disable in (False, True):
        with progress(Console(file=out), disable) as bars:
            task = bars.add_task("images", total=8)
            for now in (0.0, 30.0, 59.0, 61.0, 90.0, 122.5):  # noqa: B007
                bars.advance(task)
    told = capsys.readouterr()
    said = [line.partition(",")[0] for line in told.err.splitlines()]
    assert said == [f"images: {done} of 8" for done in (1, 4, 6)]
    assert out.getvalue() == told.out == ""


def test_equal_images_have_an_infinite_psnr_that_json_can_hold(tmp_path):
    rows = [{"method": "a", "psnr": math.inf}]
    columns = [Column("method", figure("method", "")), Column("PSNR", figure("psnr", ".2f"))]
    write_rows(tmp_path, "table", rows, {"": columns}, {"command": "x"})
    back = json.loads((tmp_path / "table.jsonl").read_text(), parse_constant=lambda name: pytest.fail(name))
    assert back["psnr"] == "inf"
    assert cells([back], columns) == cells(rows, columns) == [["a", "inf"]]


def test_a_methods_name_is_escaped_in_markdown():
    columns = [Column("method", figure("method", "")), Column("speed-up", figure("speedup", ".2f"))]
    text = to_markdown([{"method": "a | b\n<img src=x>", "speedup": 1.0}], columns)
    assert text.splitlines()[2] == "| a \\| b &lt;img src=x> | 1.00 |"


RESULTS = Path(__file__).parents[1] / "eval/results/benchmark-4096-demo"
DAMAGE = {
    "a line cut": ("table.jsonl", lambda text: text[: len(text) // 2]),
    "no rows": ("table.jsonl", lambda text: None),
    "rows of another kind": ("table.jsonl", lambda text: "[1, 2]\n"),
    "a row without its method": ("table.jsonl", lambda text: text.replace('"method"', '"way"')),
    "a figure that is none": ("table.jsonl", lambda text: text.replace('"speedup": 1', '"speedup": "x1')),
    "bytes that are no text": ("table.jsonl", lambda text: "\udcff\udcfe"),
    "settings gone": ("run.json", lambda text: text.replace('"settings"', '"put"')),
    "results that are a list": (
        "run.json",
        lambda text: json.dumps(json.loads(text) | {"results": {"table": [1]}}),
    ),
    "a key that leads outside": ("table.jsonl", lambda text: text.replace('"key": "', '"key": "../../')),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_folder_is_told_in_one_line(tmp_path, damage):
    folder = shutil.copytree(RESULTS, tmp_path / "run")
    name, change = DAMAGE[damage]
    text = change((folder / name).read_text(encoding="utf-8"))
    (folder / name).unlink()
    if text is not None:
        (folder / name).write_text(text, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(EvalError, match=r"the results of table in .* can't be read") as told:
        write_report(folder, 2)
    assert "\n" not in str(told.value)
    assert not (folder / "report.html").exists()
