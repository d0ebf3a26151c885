"""The frontier: distance to the reference image against cost, with the line of fewer steps."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from .output import plot_bytes
from .rows import Row

_MARKERS = "osD^vPX*<>hp"


def has_frontier(rows: Sequence[Row]) -> bool:
    """Whether rows have distances and costs to be drawn, fewer steps among them."""
    return sum(_is_plain(row) for row in rows if has_place(row, "reference_distance")) >= 2


def draw_frontier(rows: Sequence[Row], title: str) -> bytes:
    """Return a PNG: below the line is nearer than fewer steps of the same sampler at the same cost."""
    return plot_bytes(frontier(rows, title))


def frontier(rows: Sequence[Row], title: str = "", key: str = "reference_distance") -> Figure:
    """Return the plot; `key` is the distance: "reference_distance" or "baseline_distance"
    (to the baseline's).

    What is drawn for a row has an id that begins with `name_of` its label.
    """
    figure = Figure(figsize=(8, 5.2), layout="constrained")
    axes = figure.subplots()
    drawn = [row for row in rows if has_place(row, key)]
    baseline = next(row["macs"] for row in rows if row["method"] == "baseline")
    plain = sorted((row for row in drawn if _is_plain(row)), key=lambda row: row["macs"])
    across, up = [row["macs"] / baseline for row in plain], [1e3 * row[key] for row in plain]
    axes.plot(across, up, "-o", color="#222222", ms=4, label="fewer steps", zorder=3)
    axes.fill_between(across, up, 1e-9, color="#2a7f4f", alpha=0.07, lw=0)
    for row, x, y in zip(plain, across, up, strict=True):
        name = row["method"].partition("@")[2] or "all"
        axes.annotate(name, (x, y), textcoords="offset points", xytext=(4, 5), fontsize=8, color="#222222")
    others = [row for row in drawn if not _is_plain(row)]
    for i, row in enumerate(others):
        x, y = row["macs"] / baseline, 1e3 * row[key]
        bars = [[y - 1e3 * row[f"{key}_low"]], [1e3 * row[f"{key}_high"] - y]]
        marker = _MARKERS[i // 10 % len(_MARKERS)]
        label = row.get("label") or row["method"]
        shown = axes.errorbar(x, y, bars, fmt=marker, color=f"C{i % 10}", ms=6, lw=1, label=label)
        for number, artist in enumerate(shown.get_children()):
            artist.set_gid(f"{name_of(label)}-{number}")
    values = [1e3 * row[key] for row in drawn]
    axes.set(yscale="log", ylim=(0.7 * min(values), 1.4 * max(values)), title=title)
    axes.set_xlabel("MACs of an image, all steps of baseline = 1")
    where = "the reference image" if key == "reference_distance" else "the baseline's image"
    axes.set_ylabel(f"perceptual distance x1000 to {where}")
    axes.grid(alpha=0.3, which="both", lw=0.5)
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    for axis in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        axis(lambda value, _: f"{value:g}")
    axes.tick_params(which="both", labelsize=8)
    return figure


def name_of(label: str) -> str:
    """Return a label as an id can hold it."""
    return "row-" + "".join(c if c.isalnum() else f"_{ord(c):x}_" for c in label)


def _is_plain(row: Row) -> bool:
    return row["method"].partition("@")[0] == "baseline"


def has_place(row: Row, key: str) -> bool:
    """Whether a row has a cost, and a distance that a logarithmic axis has a place for."""
    return bool(row.get(key)) and row.get("macs") is not None
