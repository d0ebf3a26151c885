"""The plots of a run: distance over cost, and the paper's FID over seconds."""

import io
from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure
from PIL import Image

from ..files import png_bytes
from ..intervals import enough
from .rows import Row, is_baseline

MARKERS = "osD^vPX*<>hp"
INK = "#222222"


def plot_of(rows: Sequence[Row], title: str, distance: str) -> Figure | None:
    """Return distance over cost; without reference images FID (`distance`) over seconds, or nothing."""
    if sum(is_baseline(row) for row in rows if _is_placed(row)) >= 2:
        return frontier(rows, title)
    return fid_over_time(rows, title, distance) if any(row.get("fd") is not None for row in rows) else None


def frontier(rows: Sequence[Row], title: str = "") -> Figure:
    """Return the distance against MACs: below the line is nearer than fewer steps at the same cost.

    What is drawn for a row has an id that begins with `id_of` its label.
    """
    figure, axes = _axes(title)
    baseline = next(row["macs"] for row in rows if row["method"] == "baseline")
    placed = [row for row in rows if _is_placed(row)]

    def point(row: Row) -> tuple[float, float]:
        return row["macs"] / baseline, row["reference_distance"]

    plain = [row for row in placed if is_baseline(row)]
    for number, sampler in enumerate(dict.fromkeys(row.get("sampler") for row in plain)):
        fewer = sorted((row for row in plain if row.get("sampler") == sampler), key=point)
        names = [row["method"].partition("/")[0].partition("@")[2] or "all" for row in fewer]
        label, colour = (f"fewer steps, {sampler}", f"C{number}") if sampler else ("fewer steps", INK)
        line = [point(row) for row in fewer]
        _draw(axes, line, label, names, color=colour, marker="o", zorder=3)
        axes.fill_between(*zip(*line, strict=True), 1e-12, color="#2a7f4f", alpha=0.07, lw=0)
    for i, row in enumerate(row for row in placed if not is_baseline(row)):
        label, (_, up) = row.get("label") or row["method"], point(row)
        told = enough(row) and row.get("reference_distance_low") is not None
        ends = [[up - row["reference_distance_low"]], [row["reference_distance_high"] - up]] if told else None
        drawn = _draw(axes, [point(row)], label, yerr=ends, ls="none", zorder=2, **_style(i))
        for number, artist in enumerate(drawn.get_children()):
            artist.set_gid(f"{id_of(label)}-{number}")
    heights = [row["reference_distance"] for row in placed]
    axes.set(yscale="log", ylim=(0.7 * min(heights), 1.4 * max(heights)))
    axes.set_xlabel("MACs of an image, all steps of baseline = 1")
    axes.set_ylabel("perceptual distance to the reference image")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "235" else "")
    _add_legend(axes)
    return figure


def fid_over_time(rows: Sequence[Row], title: str, distance: str) -> Figure:
    """Return the paper's Fig. 5: each method's FID over its seconds an image, a point a ratio, joined."""
    figure, axes = _axes(title)
    shown = [row for row in rows if None not in (row.get("fd"), row.get("seconds"))]
    for i, method in enumerate(dict.fromkeys(row["method"] for row in shown)):
        own = sorted((row for row in shown if row["method"] == method), key=lambda row: row["ratio"] or 0)
        names = ["" if row["ratio"] is None else f"{row['ratio']:g}" for row in own]
        _draw(axes, [(row["seconds"], row["fd"]) for row in own], method, names, **_style(i))
    axes.set(xlabel="seconds an image", ylabel=distance)
    _add_legend(axes)
    return figure


def _axes(title: str) -> tuple[Figure, Any]:
    figure = Figure(figsize=(8, 5.2), layout="constrained")
    axes: Any = figure.subplots()
    axes.set_title(title)
    return figure, axes


def _draw(
    axes: Any, points: Sequence[tuple[float, float]], label: str, names: Sequence[str] = (), **how: Any
) -> Any:
    """Draw points, joined unless `how` says otherwise, with a name beside each."""
    for name, point in zip(names, points, strict=False):
        axes.annotate(name, point, (4, 5), textcoords="offset points", fontsize=8, color=INK)
    return axes.errorbar(*zip(*points, strict=True), ms=5, lw=1, label=label, **how)


def _style(number: int) -> dict[str, str]:
    return {"marker": MARKERS[number // 10 % len(MARKERS)], "color": f"C{number % 10}"}


def _add_legend(axes: Any) -> None:
    axes.grid(alpha=0.3, which="both", lw=0.5)
    axes.tick_params(which="both", labelsize=8)
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)


def id_of(label: str) -> str:
    """Return a label as an id can hold it."""
    return "row-" + "".join(c if c.isalnum() else f"_{ord(c):x}_" for c in label)


def _is_placed(row: Row) -> bool:
    """Whether a row has a cost, and a distance that a logarithmic axis can show."""
    return bool(row.get("reference_distance")) and row.get("macs") is not None


def plot_bytes(figure: Figure) -> bytes:
    """Return a plot as PNG in 256 colours: a third of the size."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    return png_bytes(Image.open(buffer).convert("RGB").quantize(256))
