"""The search over when the number of agents grows (section 5.3 of the attention mediators paper)."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from matplotlib.figure import Figure
from rich.console import Console

from ..files import write_bytes
from ..images.methods import Method, fewer, parse_method
from ..pages.plots import Series, plot_bytes
from ..pages.plots import draw as draw_series
from ..pages.rows import Row, distance_name
from ..studies.table import show
from .settings import MediatorSettings


def command(settings: MediatorSettings, console: Console) -> None:
    """Print the tables, and write them and the plot."""
    rows = show(settings, methods_of(settings), "mediators", console)
    if any(row.get("fd") is not None for row in rows):
        write_bytes(settings.out / "mediators.png", plot_bytes(draw(rows, settings.features)))
        console.print(f"plot: {settings.out / 'mediators.png'}", soft_wrap=True)


def thresholds_of(stages: int, step: float) -> Iterator[tuple[float, ...]]:
    """Yield every falling choice of `stages - 1` thresholds from {1, 1 - step, ..., 0}.

    A threshold of 0 is never reached: its stage has no step, so fewer stages are among the choices.
    """

    def below(most: int, left: int) -> Iterator[tuple[float, ...]]:
        if left == 0:
            yield ()
            return
        for place in range(most, -1, -1):
            for rest in below(place, left - 1):
                yield (round(place * step, 6), *rest)

    yield from below(round(1 / step), stages - 1)


def methods_of(settings: MediatorSettings) -> list[Method]:
    """Return baseline, then pooled agents with each choice of thresholds."""
    stages = [{"pooled_agents": {"count": count}} for count in settings.counts]
    methods = [parse_method("baseline", None, settings), *fewer(settings.fewer_steps, settings)]
    for thresholds in thresholds_of(len(settings.counts), settings.threshold_step):
        name = "mediators " + ", ".join(f"{threshold:g}" for threshold in thresholds)
        recipe = {"attention": {"stages": stages, "thresholds": list(thresholds)}}
        named = {name: {"recipe": recipe}}
        method = parse_method(name, None, settings.model_copy(update={"named": named}))
        methods.append(replace(method, varied=name.replace("mediators", "thresholds")))
    return methods


def envelope(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points that no other beats in both numbers, by the first."""
    best: list[tuple[float, float]] = []
    for point in sorted(points):
        if not best or point[1] < best[-1][1]:
            best.append(point)
    return best


def draw(rows: Sequence[Row], features: str | None) -> Figure:
    """Return distance against MACs: a point for each choice, and the envelope (Fig. 2a)."""
    have = [row for row in rows if row.get("macs") and row.get("fd") is not None]
    baseline = [row for row in have if row["method"].partition("@")[0] == "baseline"]
    others = {
        (row["macs"] / 1e9, row["fd"]): row["method"].removeprefix("mediators ")
        for row in have
        if row not in baseline
    }
    best = envelope(others)
    plot = Figure(figsize=(7, 4.5), layout="constrained")
    axes = plot.subplots()
    few = [(row["macs"] / 1e9, row["fd"]) for row in baseline]
    names = [row["method"] for row in baseline]
    series = [
        Series("thresholds", list(others), colour="tab:gray"),
        Series(
            "envelope", best, line=True, colour="tab:blue", names=[others[p] for p in best], shift=(6, -10)
        ),
        Series("baseline, also in fewer steps", few, line=True, colour="tab:red", marker="*", names=names),
    ]
    draw_series(axes, series, xlabel="MACs for an image, G", ylabel=distance_name(features))
    axes.legend()
    return plot
