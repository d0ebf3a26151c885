"""Several runs' methods in one plot: distance against cost, and each sampler's line of fewer steps."""

import re
from collections.abc import Sequence
from itertools import groupby

from matplotlib.figure import Figure

from ..pages.plots import MARKERS, Series, draw, plot_bytes
from ..pages.rows import Row

COSTS = {"macs": "MACs of an image", "seconds": "time of an image"}
"""What is drawn across, a panel each; the baseline's run of all steps is 1."""
_LINES = ("#222222", "#8a6d3b", "#5b3a8a", "#2a7f4f")


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
        series = []
        for number, sampler in enumerate(samplers):
            of_it = [row for row in rows if row["sampler"] == sampler]
            series += _series(of_it, cost, number, families)
        draw(axes, series, xscale="log", yscale="log", xlabel=f"{name}, all steps of baseline = 1")
    panels[0].set_ylabel("perceptual distance to the sampler's reference image")
    handles, labels = panels[0].get_legend_handles_labels()
    shown = dict(zip(labels, handles, strict=True))
    figure.legend(shown.values(), shown.keys(), loc="outside lower center", ncols=4, frameon=False)
    figure.suptitle(title)
    return plot_bytes(figure)


def _group(row: Row) -> str:
    """Return what a row is drawn with: fewer steps together, whatever a method is called."""
    return "" if row["plain"] else family_of(row["label"])


def _series(rows: Sequence[Row], cost: str, number: int, families: Sequence[str]) -> list[Series]:
    """Return a sampler's line of fewer steps, and its methods; the first sampler's go by their names
    alone."""
    key, marker = f"cost_{cost}", MARKERS[number % len(MARKERS)]
    series = []
    drawn = sorted((row for row in rows if row[key]), key=lambda row: (_group(row), row[key]))
    for family, group in groupby(drawn, key=_group):
        each = list(group)
        points = [(row[key], row["reference_distance"]) for row in each]
        if not family:
            label, colour = f"fewer steps, {each[0]['sampler']}", _LINES[number % len(_LINES)]
            names = [str(row["steps"]) for row in each]
            series.append(
                Series(label, points, line=True, colour=colour, marker=".", names=names, shift=(-13, -10))
            )
            continue
        bars = [(row["reference_distance_low"], row["reference_distance_high"]) for row in each]
        index = families.index(family)
        label = f"{family}, {each[0]['sampler']}" if number else family
        fill = None if index < 10 else "none"
        series.append(
            Series(label, points, bars, line=True, colour=f"C{index % 10}", marker=marker, fill=fill)
        )
    return series
