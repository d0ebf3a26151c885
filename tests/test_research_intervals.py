"""A table's figures made anew from those of its single images."""

import csv
import math

import numpy as np
import pytest
from agentsd_eval.errors import EvalError
from agentsd_eval.pages.rows import write_rows, write_singles
from agentsd_eval.quality.summary import summary_of
from agentsd_eval.research.intervals import command
from agentsd_eval.research.settings import IntervalsSettings
from agentsd_eval.studies.table import add_gain
from rich.console import Console

NAMES = {"baseline": 1.0, "baseline@12": 2.0, "baseline@8": 3.0, "fast": 2.0}


@pytest.fixture
def folder(tmp_path):
    """What `table` writes of 40 images, some of which are the baseline's."""
    random = np.random.default_rng(0)
    far = {name: random.lognormal(n, 0.3, 40) for n, name in enumerate(NAMES)}
    singles = [
        {"method": name, "index": i, "seed": i, "prompt": f"caption, {i}"}
        | {"baseline_distance": None if name == "baseline" else far[name][i] * (i > 2)}
        | {"reference_distance": far[name][i], "psnr": 30.0 + i if i > 2 else math.inf, "clip": None}
        for name in NAMES
        for i in range(40)
    ]
    rows = []
    for name, speedup in NAMES.items():
        own = [one for one in singles if one["method"] == name]
        row = {"method": name, "key": name, "label": name, "ratio": None, "sampler": None, "backend": "sdpa"}
        row |= {"speedup": speedup, "macs": round(1e9 / speedup), "images": 40, "captions": 40}
        rows.append(row | summary_of(own, None if name == "baseline" else singles[:40]))
    add_gain(rows, singles)
    write_rows(tmp_path, "table", [*rows, {"method": "real/real", "fd": 1.0}], {}, {"command": ""})
    write_singles(tmp_path / "table-images.csv", singles)
    return tmp_path


def test_the_table_follows_from_its_images(folder, capsys):
    command(IntervalsSettings(folder=folder), Console(width=200))
    assert capsys.readouterr().out.count("fast") == 1


def test_another_figure_is_told(folder):
    path = folder / "table-images.csv"
    lines = list(csv.DictReader(path.open(newline="")))
    lines[-1]["reference_distance"] = "99"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, lines[0])
        writer.writeheader()
        writer.writerows(lines)
    with pytest.raises(EvalError, match=r"of fast is .* by its images and .* there"):
        command(IntervalsSettings(folder=folder), Console())
    path.unlink()
    with pytest.raises(EvalError, match=r"table-images.csv is missing: pass the folder of a table"):
        command(IntervalsSettings(folder=folder), Console())
