"""Several runs' methods in one image: distance against cost, and each sampler's line of fewer steps."""

import re
from collections.abc import Sequence
from itertools import groupby

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..pages.output import plot_bytes
from ..pages.rows import Row

COSTS = {"macs": "MACs of an image", "seconds": "time of an image"}
"""What is drawn across, a panel each; the baseline's run of all steps is 1."""
_LINES = ("#222222", "#8a6d3b", "#5b3a8a", "#2a7f4f")
_MARKERS = "osD^vP"


def family_of(label: str) -> str:
    """Return what a row's label has in common with others of its method: "deepcache" of "deepcache-3"."""
    name = label.partition("@")[0].partition(" r=")[0]
    return re.sub(r"-[\d.]+$", "", name)


def draw_frontier(rows: Sequence[Row], title: str) -> bytes:
    """Return a PNG with a panel for each cost.

    A row has a `label`, whether it is `plain` (the baseline, of however many steps), its run's `sampler`,
    `cost_macs` and `cost_seconds` (of the baseline's run of all steps), `reference` and its interval
    `reference_distance_low` and `reference_distance_high`. Rows of one method and sampler
    are joined by a line. Methods keep their colour under every sampler, and samplers have a marker each.
    """
    figure = Figure(figsize=(10, 6.4), layout="constrained")
    samplers = list(dict.fromkeys(row["sampler"] for row in rows))
    families = list(dict.fromkeys(family_of(row["label"]) for row in rows if not row["plain"]))
    panels = figure.subplots(1, len(COSTS), sharey=True)
    for axes, (cost, name) in zip(panels, COSTS.items(), strict=True):
        for number, sampler in enumerate(samplers):
            of_it = [row for row in rows if row["sampler"] == sampler]
            _draw_sampler(axes, of_it, cost, number, families)
        axes.set(xscale="log", yscale="log", xlabel=f"{name}, all steps of baseline = 1")
        axes.grid(alpha=0.3, which="both", lw=0.5)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(lambda value, _: f"{value:g}")
            axis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "235" else "")
        axes.tick_params(which="both", labelsize=9)
    panels[0].set_ylabel("perceptual distance x1000 to the sampler's reference image")
    handles, labels = panels[0].get_legend_handles_labels()
    shown = dict(zip(labels, handles, strict=True))
    figure.legend(shown.values(), shown.keys(), loc="outside lower center", ncols=4, frameon=False)
    figure.suptitle(title)
    return plot_bytes(figure)


def _group(row: Row) -> str:
    """Return what a row is drawn with: fewer steps together, whatever a method is called."""
    return "" if row["plain"] else family_of(row["label"])


def _draw_sampler(axes: Axes, rows: Sequence[Row], cost: str, number: int, families: Sequence[str]) -> None:
    """Draw a sampler's line of fewer steps, and its methods; the first sampler's go by their names alone."""
    place, line, marker = f"cost_{cost}", _LINES[number % len(_LINES)], _MARKERS[number % len(_MARKERS)]
    drawn = sorted((row for row in rows if row[place]), key=lambda r: (_group(r), r[place]))
    for family, group in groupby(drawn, key=_group):
        each = list(group)
        across, up = [row[place] for row in each], [1e3 * row["reference_distance"] for row in each]
        if not family:
            label = f"fewer steps, {each[0]['sampler']}"
            axes.plot(across, up, "-", marker=".", color=line, lw=2, label=label, zorder=3)
            for row, x, y in zip(each, across, up, strict=True):
                steps = str(row["steps"])
                axes.annotate(steps, (x, y), textcoords="offset points", xytext=(-13, -10), fontsize=8)
            continue
        ends = [
            [1e3 * abs(row["reference_distance"] - row[f"reference_distance_{end}"]) for row in each]
            for end in ("low", "high")
        ]
        colour = f"C{families.index(family) % 10}"
        face = colour if families.index(family) < 10 else "none"
        label = f"{family}, {each[0]['sampler']}" if number else family
        axes.errorbar(across, up, ends, fmt=f"-{marker}", color=colour, mfc=face, ms=6, lw=1, label=label)
