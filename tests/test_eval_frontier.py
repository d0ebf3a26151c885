import io

import numpy as np
from agentsd_eval.pages.plots import fid_over_time, frontier, plot_bytes, plot_of
from PIL import Image


def row(method, macs, distance):
    named = {"method": method, "label": method, "macs": macs}
    if distance is None:
        return named
    return named | {
        "reference_distance": distance,
        "reference_distance_low": 0.9 * distance,
        "reference_distance_high": 1.1 * distance,
    }


ROWS = [
    row("baseline", 100, 0.1),
    row("baseline@12", 50, 0.2),
    row("paper", 80, 0.3),
    row("real/real", None, None),
]


def test_there_is_a_frontier_where_fewer_steps_were_measured():
    def across(rows):
        found = plot_of(rows, "", "FID")
        return found and found.axes[0].get_xlabel()

    assert "MACs" in across(ROWS)
    unplaced = [row("baseline", 100, None), row("baseline@12", 50, None)]
    for rows in (ROWS[:1] + ROWS[2:], unplaced):
        assert across(rows) is None
        timed = [one | {"fd": 2.0, "seconds": 1.0, "ratio": None} for one in rows]
        assert across(timed) == "seconds an image"


def test_a_method_below_the_line_is_drawn_below_it():
    """The same plot but for one point, which moves up by as much as its distance grows."""

    def ink(distance):
        rows = [*ROWS[:2], row("paper", 75, distance)]
        image = Image.open(io.BytesIO(plot_bytes(frontier(rows, ""))))
        blue = (31, 119, 180)  # the first colour of methods
        return np.argwhere((np.asarray(image.convert("RGB")) == blue).all(-1))[:, 0].mean()

    assert ink(0.11) > ink(0.19)


def test_each_samplers_fewer_steps_are_a_line_of_their_own():
    others = [row("baseline/b", 100, 0.08), row("baseline@12/b", 50, 0.15)]
    axes = frontier([*ROWS[:3], *(one | {"sampler": "b"} for one in others)], "").axes[0]
    lines = {one.get_label(): one.lines[0].get_ydata().tolist() for one in axes.containers if one.lines[0]}
    assert lines["fewer steps"] == [0.2, 0.1]
    assert lines["fewer steps, b"] == [0.15, 0.08]
    assert [text.get_text() for text in axes.texts] == ["12", "all", "12", "all"]


def test_the_papers_figure_joins_a_methods_ratios():
    rows = [("baseline", None, 9.0, 5.0), ("agentsd", 0.4, 4.0, 7.0), ("agentsd", 0.1, 6.0, 6.0)]
    rows = [dict(zip(("method", "ratio", "seconds", "fd"), row, strict=True)) for row in rows]
    rows.append({"method": "real/real", "ratio": None, "fd": 2.0})  # takes no time
    axes = fid_over_time(rows, "", "FID").axes[0]
    lines = {one.get_label(): one.lines[0].get_xydata().tolist() for one in axes.containers}
    assert lines == {"baseline": [[9, 5]], "agentsd": [[6, 6], [4, 7]]}
    assert [text.get_text() for text in axes.texts] == ["", "0.1", "0.4"]
    assert axes.get_ylabel() == "FID"
