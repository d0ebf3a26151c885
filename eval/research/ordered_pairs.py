"""What the metrics see of known degradations, drawn: each ordered pair with its interval."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from ..pages.plots import INK, Series, draw, plot_bytes
from ..pages.rows import Row

COLOURS = {"seen": "#2a7f4f", "not told apart": "#888888", "out of order": "#b3261e"}
_PANELS = (("to reference image", "log", 1), ("to the baseline", "log", 1), ("kid", "linear", 0))


def pair_of(row: Row) -> str:
    """Return a pair's smaller and greater degradation."""
    return f"{row['less'].removesuffix('-sdpa')} < {row['more'].removesuffix('-sdpa')}"


def draw_pairs(pairs: Sequence[Row], title: str) -> bytes:
    """Return a PNG with a panel for each measure; right of its line the greater degradation is seen."""
    names = list(dict.fromkeys(pair_of(row) for row in pairs))
    panels = [panel for panel in _PANELS if any(row["measure"] == panel[0] for row in pairs)]
    figure = Figure(figsize=(3 + 2.6 * len(panels), 1.2 + 0.28 * len(names)), layout="constrained")
    every = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, (measure, scale, nothing) in zip(every, panels, strict=True):
        series = [
            Series(
                "",
                [(row["value"], names.index(pair_of(row)))],
                [(row["low"], row["high"])],
                upright=False,
                colour=COLOURS[row["verdict"]],
            )
            for row in pairs
            if row["measure"] == measure
        ]
        what = "difference x1000" if scale == "linear" else "greater / smaller"
        draw(axes, series, xscale=scale, xlabel=what, title=measure)
        axes.axvline(nothing, color=INK, lw=1)
    every[0].set_yticks(range(len(names)), names, fontsize=8)
    every[0].invert_yaxis()
    for verdict, colour in COLOURS.items():
        every[0].plot([], [], "o", color=colour, ms=4, label=verdict)
    figure.legend(loc="outside lower center", ncols=len(COLOURS), fontsize=8, frameon=False)
    figure.suptitle(title)
    return plot_bytes(figure)
