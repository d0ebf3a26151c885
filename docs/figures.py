"""Writes the figures of README and docs from the results they are of: `python docs/figures.py`. Behind it may
stand the folder of README's run with its images: then README's images are drawn from them anew.

A figure stands between `<!--=ROW KIND-->` and `<!--=-->`, a table between `<!--=table NAME-->` and that, and
a link to a run's rows between `<!--=link RUN-->` and that. `<!-- figures of RUN -->` names the run whose rows
the figures after it are read from. tables.yaml has the tables, and the folder of eval/results of each run.
The README's plot is drawn from its table's run, too.
tests/test_readme.py fails where a page or the plot differs from the results.
"""

from __future__ import annotations

import csv
import json
import math
import os
import re
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from agentsd_eval.intervals import enough, half

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "demo/agentsd_demo/MODEL_CARD.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
PLOT = ROOT / "docs/images/fewer_steps.png"
IMAGES = ROOT / "docs/images/same_seeds.webp"
_RUN = re.compile(r"<!-- figures of (\S+) -->")
_MARKED = re.compile(r"(<!--=([^>]+?) ([\w-]+?)-->)(.*?)(<!--=-->)", re.S)

Row = dict[str, Any]
Rows = dict[str, Row]


def _base(row: Row, rows: Rows) -> Row:
    """Baseline in as many steps."""
    _, at, steps = row["label"].partition("@")
    return rows[f"baseline{at}{steps}"]


def _gain(by: str, interval: bool) -> Callable[[Row, Rows], str]:
    def gain(row: Row, rows: Rows) -> str:
        name = f"gain_{by}"
        if name not in row:
            return ""
        sign = {"more": "> ", "less": "< "}.get(row[f"{name}_beyond"] or "", "")
        low, high = (f"{row[f'{name}_{end}'] or 0:.2f}" for end in ("low", "high"))
        bounds = f" ({low}-{high})" if interval and enough(row) and low != high else ""  # a bound has none
        return f"{sign}{row[name]:.2f}{bounds}"

    return gain


def _saved(row: Row, rows: Rows) -> str:
    """The share of the best plain sampler's time that a method saves where it comes as near: 1 - 1 / gain."""
    saved, low, high = (round(100 - 100 / row[f"gain_best_seconds{end}"]) for end in ("", "_low", "_high"))
    return f"{saved}%" + (f" ({low}-{high}%)" if enough(row) else "")


def _distance_range(row: Row, rows: Rows) -> str:
    value, low, high = (row.get(f"reference_distance{end}") for end in ("", "_low", "_high"))
    return f"{value:.3f}" + (f" ({low:.3f}-{high:.3f})" if enough(row) and low else "")


def _images(measure: str) -> Callable[[Row, Rows], str]:
    """How many images show a difference: intervals narrow with the square root of their number, here 32.

    Of fewer than eight that is too few, as a standard deviation of few is wide.
    """

    def images(row: Row, rows: Rows) -> str:
        value, low, high = (row[measure][name] for name in ("value", "low", "high"))
        if measure != "kid":
            value, low, high = map(math.log, (value, low, high))
        if value <= 0:
            return "-"
        needed = math.ceil(32 * ((high - low) / 2 / value) ** 2 - 1e-9)
        return "< 8" if needed < 8 else f"{needed:,}" if needed <= 5000 else "> 5,000"

    return images


def _change(name: str, form: str) -> Callable[[Row, Rows], str]:
    """A change against the baseline and half of its 95% interval; nothing of too few images."""

    def change(row: Row, rows: Rows) -> str:
        if f"{name}_change" not in row or not enough(row):
            return ""
        wide = half(row[f"{name}_change_error"], row.get("captions", row["images"]))
        return f"{row[f'{name}_change']:+{form}} ± {wide:{form}}"

    return change


KINDS: dict[str, Callable[[Row, Rows], str]] = {
    "macs": lambda row, rows: f"{row['macs'] / rows['baseline']['macs']:.2f}",
    "fewer-macs": lambda row, rows: f"{_base(row, rows)['macs'] / row['macs']:.2f}x",
    "images": lambda row, rows: str(row["images"]),
    "seconds": lambda row, rows: f"{row['cpu_seconds']:.1f}",
    "faster": lambda row, rows: f"{row['speedup']:.2f}x",
    "plms-faster": lambda row, rows: f"{rows['table10 baseline']['plms'] / row['plms']:.2f}x",
    "memory": lambda row, rows: f"{row['memory_per_image']:.2f}" if row.get("memory_per_image") else "",
    "distance": lambda row, rows: f"{row['reference_distance']:.3f}",
    "distance-range": _distance_range,
    "gain": _gain("seconds", interval=False),
    "gain-range": _gain("seconds", interval=True),
    "gain-macs": _gain("macs", interval=False),
    "gain-macs-range": _gain("macs", interval=True),
    "gain-best": _gain("best_seconds", interval=False),
    "gain-best-macs": _gain("best_macs", interval=False),
    "gain-best-macs-range": _gain("best_macs", interval=True),
    "gain-best-range": _gain("best_seconds", interval=True),
    "saved-best-range": _saved,
    "fd": lambda row, rows: f"{row['fd']:.1f}" if enough(row) else "",
    "fd-change": _change("fd", ".1f"),
    "kid-change": _change("kid", ".4f"),
    "shown-perceptual": _images("to reference image"),
    "shown-kid": _images("kid"),
    **{
        name: lambda row, rows, name=name: f"{row[f'right_{name}']:.0%}"
        for name in ("seen", "heldout_triple", "heldout_pair", "colour")
    },
}


def figure(kind: str, row: Row, rows: Rows) -> str:
    """A row's figure of a kind; what is no kind is a column of the rows."""
    if kind in KINDS:
        return KINDS[kind](row, rows)
    value = row.get(kind)
    digits = 4 if kind.startswith("forward") else 2 if value is None or value < 100 else 0
    return "" if value is None else f"{value:.{digits}f}"


_CONTENT = yaml.safe_load((ROOT / "docs/tables.yaml").read_text(encoding="utf-8"))
RUNS: dict[str, str] = _CONTENT["runs"]
TABLES: dict[str, dict[str, Any]] = _CONTENT["tables"]


def folder_of(run: str) -> Path:
    """The folder of a run's results."""
    return ROOT / "eval/results" / RUNS.get(run, run)


@cache
def rows_of(run: str) -> Rows:
    """The rows of a run's table by their labels; of latencies by method; of a validation by its pairs."""
    (path,) = folder_of(run).glob("*.jsonl")
    rows = list(map(json.loads, path.read_text(encoding="utf-8").splitlines()))
    if "less" in rows[0]:
        return _pairs(rows)
    if "stage" in rows[0]:
        return _stages(rows)
    if "scope" in rows[0]:
        return _methods(rows)
    return {row.get("label") or row["method"]: row for row in rows}


def _pairs(rows: list[Row]) -> Rows:
    """A row for each ordered pair, "LESS < MORE", with its differences by metric."""
    pairs: Rows = {}
    for row in rows:
        pair = f"{row['less']} < {row['more']}".replace("-sdpa", "")
        pairs.setdefault(pair, {})[row["measure"]] = row
    return pairs


def _methods(rows: list[Row]) -> Rows:
    """A row for each method, with what it takes at each size: "cpu_seconds 512", "speedup 512"."""
    methods: Rows = {}
    for row in rows:
        sized = {f"{kind} {row['size']}": row[kind] for kind in ("cpu_seconds", "speedup")}
        methods.setdefault(row["method"], {}).update(sized)
    return methods


def _stages(rows: list[Row]) -> Rows:
    """A row for each method of a GPU's stages ("seconds pipeline 512 1 sdpa"); in Table 10 by ratio too."""
    methods: Rows = {}
    decoding = next(row["seconds"] for row in rows if row["stage"] == "decoder" and row["batch"] == 8)
    for row in rows:
        if "method" not in row:
            continue
        if row["stage"] == "table10":
            ratio = f" r={row['ratio']}" if row["ratio"] else ""
            own = methods.setdefault(f"table10 {row['method']}{ratio}", {})
            own[row["scope"]] = row["seconds"]
            own["memory"] = max(row["memory_per_image"], own.get("memory", 0))
            if row["scope"] == "forward late":  # 51 calls of PLMS for 8 images
                own["plms"] = (20 * own["forward early"] + 31 * row["seconds"] + decoding) / 8
            continue
        own = methods.setdefault(row["method"], {})
        if row["stage"] == "memory":
            own |= {f"{kind} {row['backend']}": row[kind] for kind in ("per_image", "reserved")}
            own[f"denoising {row['backend']}"] = row["denoising"][0]
        elif row["stage"] == "kernels":
            own[f"device {row['scope']}"] = 1000 * row["device_seconds"]
            own[f"kernels {row['scope']}"] = row["kernels"]
        elif "seconds" in row:
            case = f"{row['scope']} {row['size']} {row['batch']} {row['backend']}"
            own |= {f"{kind} {case}": row[kind] for kind in ("seconds", "speedup", "memory_per_image")}
    return methods


def table(name: str) -> str:
    """A Markdown table. Rows that its run lacks, and columns that have nothing in them, are left out."""
    columns, wanted, rows = TABLES[name]["columns"], TABLES[name]["rows"], rows_of(TABLES[name]["run"])
    kept = {head: rows[label] for head, label in wanted.items() if label in rows}
    cells = [[head, *(figure(kind, row, rows) for kind in columns.values())] for head, row in kept.items()]
    full = [i for i in range(len(columns) + 1) if any(line[i] for line in cells)]
    head, *lines = ("| " + " | ".join(line[i] for i in full) + " |" for line in [["", *columns], *cells])
    return "\n" + "\n".join([head, "|" + "---|" * len(full), *lines]) + "\n"


def written(text: str, page: Path = ROOT / "README.md") -> str:
    """A page's text with its figures as the results have them."""
    runs = [(named.start(), named[1]) for named in _RUN.finditer(text)]

    def fill(match: re.Match[str]) -> str:
        start, label, kind, _, end = match.groups()
        if label == "table":
            return start + table(kind) + end
        if label == "link":
            path = Path(os.path.relpath(folder_of(kind), page.parent)).as_posix()
            return f"{start}[every row]({path}/table.md){end}"
        rows = rows_of([run for place, run in runs if place < match.start()][-1])
        return start + figure(kind, rows[label], rows) + end

    return _MARKED.sub(fill, text)


def unmarked(text: str) -> str:
    """A page's text without what stands between marks."""
    return _MARKED.sub("", text)


def points() -> dict[str, Any]:
    """What the plot shows of README's run: seconds and distance of plain samplers and of methods."""
    plot = _CONTENT["plot"]
    rows = rows_of(plot["run"])

    def point(label: str) -> tuple[float, float]:
        return round(rows[label]["cpu_seconds"], 2), round(rows[label]["reference_distance"], 4)

    lines: dict[str, dict[str, tuple[float, float]]] = {name: {} for name in plot["samplers"]}
    for label in rows:
        method, _, sampler = label.partition("/")
        kind, _, steps = method.partition("@")
        for name, of in plot["samplers"].items():
            if kind == "baseline" and sampler == of and int(steps or 25) >= plot["fewest_steps"]:
                lines[name][steps or "25"] = point(label)
    return {
        "run": RUNS[plot["run"]],
        "samplers": lines,
        "methods": {name: point(label) for name, label in plot["methods"].items() if label in rows},
    }


def draw(shown: dict[str, Any], path: Path) -> None:
    """Write the plot, with what it shows as its description."""
    import numpy as np
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    lines = {name: np.array(sorted(of.values())) for name, of in shown["samplers"].items()}
    for (name, line), style in zip(lines.items(), ("-o", "--s"), strict=True):
        axes.plot(*line.T, style, color="#444444", ms=5, zorder=2, label=f"plain {name}, fewer steps")
    of_first = next(iter(shown["samplers"].values()))
    for steps in (min(of_first, key=int), max(of_first, key=int)):
        place, shift = max((of[steps] for of in shown["samplers"].values()), key=lambda at: at[1]), (0, 9)
        axes.annotate(
            f"{steps} steps", place, shift, textcoords="offset points", ha="center", color="#444444"
        )
    seconds = np.linspace(
        max(line[0, 0] for line in lines.values()), min(line[-1, 0] for line in lines.values())
    )
    best = np.min([np.interp(seconds, *line.T) for line in lines.values()], axis=0)
    axes.fill_between(seconds, best, color="#2a7f4f", alpha=0.09, lw=0)
    for i, (name, place) in enumerate(shown["methods"].items()):
        first = i == 0
        axes.plot(*place, "o", ms=10 if first else 7, color="#c4600c" if first else "#2b6cb0", zorder=3)
        # The first is near the line: it is named to the left.
        shift, side = ((-9, -4), "right") if first else ((9, -4), "left")
        weight = "bold" if first else "normal"
        axes.annotate(name, place, shift, textcoords="offset points", ha=side, weight=weight)
    places = [*shown["methods"].values(), *(place for line in lines.values() for place in line)]
    rights, tops = zip(*places, strict=True)
    axes.set(ylim=(0, 1.15 * max(tops)), xlim=(0.85 * min(rights), 1.12 * max(rights)))
    axes.set_xlabel("CPU seconds an image")
    axes.set_ylabel("perceptual distance to the reference image")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    axes.text(seconds[len(seconds) // 2], 0.002, "nearer in the same time", color="#2a7f4f", fontsize=9)
    path.parent.mkdir(exist_ok=True)
    description = json.dumps(shown, sort_keys=True)
    figure.savefig(path, dpi=130, metadata={"Description": description, "Software": None})


def draw_images(folder: Path) -> None:
    """Write README's images, seeds of its run; below each row but the first, where it differs from that."""
    from agentsd_eval.pages.grid import draw_grid
    from agentsd_eval.studies.compare import with_differences
    from PIL import Image

    shown = _CONTENT["images"]
    prompts = {
        int(row["seed"]): row["prompt"] for row in csv.DictReader((folder / "table-images.csv").open())
    }

    def images(key: str) -> list[Any]:
        return [Image.open(folder / "images" / key / f"{seed:05d}.png") for seed in shown["seeds"]]

    figures = rows_of(_CONTENT["plot"]["run"])

    def caption(name: str, label: str) -> str:
        row = figures[label]
        return f"{name}\n{row['cpu_seconds']:.1f} s\ndistance {row['reference_distance']:.3f}"

    rows = {caption(name, label): images(key) for name, (label, key) in shown["rows"].items()}
    grid, labels = with_differences(list(rows.values()), list(rows))
    heads = [prompts[seed] for seed in shown["seeds"]]
    draw_grid(grid, labels, heads, tile=112).save(IMAGES, quality=85, method=6)


if __name__ == "__main__":
    for folder in sys.argv[1:]:
        draw_images(Path(folder))
    for page in PAGES:
        before = page.read_text(encoding="utf-8")
        if (after := written(before, page)) != before:
            page.write_text(after, encoding="utf-8")
            print(page.relative_to(ROOT))
    draw(points(), PLOT)
    for name, content in TABLES.items():
        if missing := sorted(set(content["rows"].values()) - set(rows_of(content["run"]))):
            print(f"{name}: {RUNS.get(content['run'], content['run'])} has no {', '.join(missing)}")
