"""The one plotter: series of points with their intervals on axes; and the plots of a report."""

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure
from PIL import Image

from ..files import png_bytes
from .rows import Row

MARKERS = "osD^vPX*<>hp"
INK = "#222222"


@dataclass(frozen=True)
class Series:
    """Points of one label.

    Attributes:
        label: in the legend; "" for none.
        points: x and y.
        bars: lower and upper ends of each point's interval.
        upright: whether intervals are of y, not of x.
        line: whether the points are joined.
        names: what stands beside each point.
        gid: begins the ids of what is drawn, for SVG.
    """

    label: str
    points: Sequence[tuple[float, float]]
    bars: Sequence[tuple[float, float]] = ()
    upright: bool = True
    line: bool = False
    colour: str = INK
    marker: str = "o"
    names: Sequence[str] = ()
    gid: str = ""


def draw(axes: Any, series: Sequence[Series], **labels: Any) -> None:
    """Draw series on axes; `labels` are those of `Axes.set`: scales, limits, titles."""
    for one in series:
        across, up = zip(*one.points, strict=True)
        middles = up if one.upright else across
        ends = [[m - low for m, (low, _) in zip(middles, one.bars, strict=True)]] if one.bars else []
        ends += [[high - m for m, (_, high) in zip(middles, one.bars, strict=True)]] if one.bars else []
        drawn = axes.errorbar(
            across,
            up,
            **({"yerr" if one.upright else "xerr": ends} if ends else {}),
            marker=one.marker,
            ls="-" if one.line else "none",
            color=one.colour,
            ms=5,
            lw=1,
            label=one.label or None,
            zorder=3 if one.line else 2,
        )
        if one.gid:
            for number, artist in enumerate(drawn.get_children()):
                artist.set_gid(f"{one.gid}-{number}")
        for name, point in zip(one.names, one.points, strict=False):
            axes.annotate(name, point, (4, 5), textcoords="offset points", fontsize=8, color=INK)
    axes.set(**labels)
    axes.grid(alpha=0.3, which="both", lw=0.5)
    axes.tick_params(which="both", labelsize=8)
    for axis in (axes.xaxis, axes.yaxis):
        if axis.get_scale() == "log":
            axis.set_major_formatter(lambda value, _: f"{value:g}")
            axis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "235" else "")


def has_frontier(rows: Sequence[Row]) -> bool:
    """Whether rows have distances and costs to be drawn, fewer steps among them."""
    return sum(is_baseline(row) for row in rows if is_placed(row, "reference_distance")) >= 2


def frontier(rows: Sequence[Row], title: str = "", key: str = "reference_distance") -> Figure:
    """Return the distance against MACs: below the line is nearer than fewer steps at the same cost.

    `key` is the distance: "reference_distance" or "baseline_distance" (to the baseline's). What is drawn for
    a row has an id that begins with `id_of` its label.
    """
    figure = Figure(figsize=(8, 5.2), layout="constrained")
    axes = figure.subplots()
    baseline = next(row["macs"] for row in rows if row["method"] == "baseline")
    placed = [row for row in rows if is_placed(row, key)]
    series: list[Series] = []
    lines: list[list[tuple[float, float]]] = []
    for sampler in dict.fromkeys(row.get("sampler") for row in placed if is_baseline(row)):
        fewer = [row for row in placed if is_baseline(row) and row.get("sampler") == sampler]
        fewer.sort(key=lambda row: row["macs"])
        line = [(row["macs"] / baseline, row[key]) for row in fewer]
        names = [row["method"].partition("/")[0].partition("@")[2] or "all" for row in fewer]
        label = f"fewer steps, {sampler}" if sampler else "fewer steps"
        colour = f"C{len(lines)}" if sampler else INK
        series.append(Series(label, line, line=True, names=names, colour=colour))
        lines.append(line)
    for i, row in enumerate(row for row in placed if not is_baseline(row)):
        point = (row["macs"] / baseline, row[key])
        label = row.get("label") or row["method"]
        bars = [(row[f"{key}_low"], row[f"{key}_high"])]
        marker, colour = MARKERS[i // 10 % len(MARKERS)], f"C{i % 10}"
        series.append(Series(label, [point], bars, marker=marker, colour=colour, gid=id_of(label)))
    heights = [row[key] for row in placed]
    where = "the reference image" if key == "reference_distance" else "the baseline's image"
    draw(
        axes,
        series,
        yscale="log",
        ylim=(0.7 * min(heights), 1.4 * max(heights)),
        title=title,
        xlabel="MACs of an image, all steps of baseline = 1",
        ylabel=f"perceptual distance to {where}",
    )
    for line in lines:
        across, up = zip(*line, strict=True)
        axes.fill_between(across, up, 1e-12, color="#2a7f4f", alpha=0.07, lw=0)
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    return figure


def fid_over_time(rows: Sequence[Row], title: str, distance: str) -> Figure:
    """Return the paper's Fig. 5: each method's FID over its seconds an image, a point a ratio, joined."""
    figure = Figure(figsize=(8, 5.2), layout="constrained")
    axes = figure.subplots()
    shown = [row for row in rows if None not in (row.get("fd"), row.get("seconds"))]
    series = []
    for i, method in enumerate(dict.fromkeys(row["method"] for row in shown)):
        own = sorted((row for row in shown if row["method"] == method), key=lambda row: row["ratio"] or 0)
        points = [(row["seconds"], row["fd"]) for row in own]
        names = ["" if row["ratio"] is None else f"{row['ratio']:g}" for row in own]
        marker, colour = MARKERS[i // 10 % len(MARKERS)], f"C{i % 10}"
        series.append(Series(method, points, line=True, names=names, colour=colour, marker=marker))
    draw(axes, series, title=title, xlabel="seconds an image", ylabel=distance)
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    return figure


def speeds(rows: Sequence[Row], labels: Sequence[str], ids: Sequence[str], clock: str) -> Figure:
    """Return each row's speed-up, with the least and greatest ratio of its rounds, the first row above."""
    figure = Figure(figsize=(8, 0.8 + 0.24 * len(rows)), layout="constrained")
    axes = figure.subplots()
    series = []
    for i, row in enumerate(rows):
        bars = [(row["speedup_low"], row["speedup_high"])]
        point = (row["speedup"], len(rows) - 1 - i)
        series.append(Series("", [point], bars, upright=False, colour="#1f5fa8", gid=f"{ids[i]}-{i}"))
    draw(axes, series, xlabel=f"speed-up ({clock} time), baseline with the same attention = 1")
    axes.axvline(1, color=INK, lw=1)
    axes.set_yticks(range(len(rows)), reversed(list(labels)), fontsize=8)
    return figure


def id_of(label: str) -> str:
    """Return a label as an id can hold it."""
    return "row-" + "".join(c if c.isalnum() else f"_{ord(c):x}_" for c in label)


def is_baseline(row: Row) -> bool:
    """Whether a row is of the baseline, in however many steps, under whichever sampler."""
    return re.split("[@/]", row["method"])[0] == "baseline"


def is_placed(row: Row, key: str) -> bool:
    """Whether a row has a cost, and a distance that a logarithmic axis can show."""
    return bool(row.get(key)) and row.get("macs") is not None


def plot_bytes(figure: Figure) -> bytes:
    """Return a plot as PNG in 256 colours: a third of the size."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    return png_bytes(Image.open(buffer).convert("RGB").quantize(256))
