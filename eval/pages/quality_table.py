"""The tables of a run: distances, fidelity and cost, a row for each method."""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from ..intervals import FEWEST, enough, half
from ..names import read
from .rows import Column, Row, distance_name, figure, filled, giga, is_baseline, method_text

TOO_FEW = "too few to judge"
EQUAL = "equal"
"""What stands where every image is the one that it is compared with."""


def row_label(row: Row) -> str:
    """Return what a row is called: a name of the user's own, or its method, ratio and settings."""
    return row.get("label") or method_text(row)


def change(key: str, form: str, factor: float = 1.0, count: str = "images") -> Callable[[Row], str]:
    """Return a column's text: the change against the baseline with its 95% half-width, "≈" if inside the
    noise.

    `count` is the figure of the row that says how many images it is of.
    """

    def text(row: Row) -> str:
        value, error = row.get(f"{key}_change"), row.get(f"{key}_change_error")
        if value is None or error is None:
            return "-"
        if not enough(row, count):
            return TOO_FEW
        wide = half(error, int(row.get("captions") or row.get(count) or FEWEST))
        return f"{format(factor * value, '+' + form)} ± {format(factor * wide, form)}" + (
            " ≈" if abs(value) <= wide else ""
        )

    return text


def interval(key: str) -> Callable[[Row], str]:
    """Return a column's text: a distance and its 95% interval."""

    def text(row: Row) -> str:
        if row.get(key) is None:
            return "-"
        if row[key] == 0:
            return EQUAL
        if not enough(row) or row.get(f"{key}_low") is None:
            return f"{row[key]:.4f}"
        return f"{row[key]:.4f} ({row[f'{key}_low']:.4f}-{row[f'{key}_high']:.4f})"

    return text


def gain(key: str) -> Callable[[Row], str]:
    """Return a column's text: what fewer steps cost at this distance, over the row's own cost."""

    def text(row: Row) -> str:
        if row.get(key) is None:
            return "-"
        bound = {"more": "> ", "less": "< "}.get(row[f"{key}_beyond"] or "", "")
        low, high = row.get(f"{key}_low"), row.get(f"{key}_high")
        if not enough(row) or low is None or high is None:
            return f"{bound}{row[key]:.2f}"
        return f"{bound}{row[key]:.2f} ({low:.2f}-{high:.2f})" + (" no" if round(high, 2) < 1 else "")

    return text


def paper_columns(features: str | None, scenes: bool) -> list[Column]:
    """Return the columns of the paper's Table 10, in its order; an empty one stands, too."""
    return [
        Column("method", method_name),
        Column("ratio", figure("ratio", "g")),
        Column(distance_name(features, scenes), figure("fd", ".4g")),
        Column("s/img", figure("seconds", ".3g")),
        Column("GB/img", figure("memory_per_image", ".2f", "n/a")),
    ]


def method_name(row: Row) -> str:
    """Return what a row is called, without the ratio, which has a column of its own."""
    ratio = row.get("ratio")
    return row_label(row) if ratio is None else row_label(row).replace(f" r={ratio:g}", "", 1)


def tables_of(rows: Sequence[Row], settings: Mapping[str, Any], clock: str) -> dict[str, list[Column]]:
    """Return the columns of each table by its title, the paper's first; `settings` are the run's.

    `clock` is what speed-ups are computed from. In the others a column without a figure is left out.
    """
    features, scenes = settings["features"], settings["model"] == "demo"
    tables = {
        "perceptual distance to the same seed's images (95%)": [
            Column("images", figure("images", "d")),
            Column("to reference image", interval("reference_distance")),
            Column("to the baseline", interval("baseline_distance")),
            Column("gain, best plain sampler, by time", gain("gain_best_seconds")),
            Column("gain, best plain sampler, by MACs", gain("gain_best_macs")),
            Column("gain, by time", gain("gain_seconds")),
            Column("gain, by MACs", gain("gain_macs")),
            Column("PSNR to the baseline, dB", _psnr),
            Column("equal to the baseline's", figure("equal_images", "d")),
        ],
        "distance of distributions": [
            Column("KID x1000 ± s.e.", _kernel),
            Column("KID change", change("kid", ".2f", 1e3)),
            Column(distance_name(features, scenes), figure("fd", ".4g")),
            Column("FD change", change("fd", ".3g")),
        ],
        "fit to the prompt": [
            Column("CLIP score", figure("clip", ".2f")),
            Column("CLIP change", change("clip", ".2f")),
        ],
        "cost": [
            Column("attention", figure("backend", "")),
            Column("s/img", figure("seconds", ".3f")),
            Column("CPU s/img", figure("cpu_seconds", ".3f")),
            Column(f"speed-up ({clock} time)", figure("speedup", ".2f")),
            Column("GMACs/img", giga("macs")),
            Column("denoising, GB/img", figure("denoising_memory", ".2f")),
            Column("decoding, GB/img", figure("decoding_memory", ".2f")),
        ],
    }
    shown = {title: filled(rows, columns) for title, columns in tables.items()}
    others = {title: [Column("method", row_label), *columns] for title, columns in shown.items() if columns}
    return {"the paper's table": paper_columns(features, scenes)} | others


def _psnr(row: Row) -> str:
    if row.get("psnr") is None:
        return EQUAL if row.get("equal_images") else "-"
    return f"{row['psnr']:.2f}"


def _kernel(row: Row) -> str:
    if row.get("kid") is None:
        return "-"
    error = f" ± {1e3 * row['kid_error']:.2f}" if enough(row) else ""
    return f"{1e3 * row['kid']:.2f}{error}"


def verdict(rows: Sequence[Row]) -> str:
    """Return which rows gain by time: what a table, its page and `check` say first."""
    key = by_time(rows)
    found = [row for row in rows if row.get(key) is not None and not is_baseline(row)]
    if not found:
        same = [row_label(row) for row in rows if row.get("equal_images", 0) == row.get("images")]
        told = f"The images of {', '.join(same)} are the baseline's. " if same else ""
        return f"{told}No row's gain is known: it takes the baseline in fewer steps, and recipes."
    if not all(map(enough, found)):
        return f"{found[0].get('images')} images a row don't say what gains: take {FEWEST} prompts or more."
    if told := disturbed(rows):
        return told
    plain = "the best plain sampler" if "best" in key else "fewer steps"
    gains = [
        f"{row_label(row)} takes {1 - 1 / row[key]:.0%} less time than {plain} for images as near to the "
        f"reference: gain {gain(key)(row)}."
        for row in sorted(found, key=lambda row: -row[key])
        if (row.get(f"{key}_low") or 0) > 1
    ]
    return " ".join(gains) or f"Nothing here is better than {plain} beyond the error: take fewer steps."


def by_time(rows: Sequence[Row]) -> str:
    """Return the figure that is the rows' gain by time: over the best of several plain samplers, if any."""
    best = "gain_best_seconds"
    return best if any(row.get(best) is not None for row in rows) else "gain_seconds"


def disturbed(rows: Sequence[Row]) -> str:
    """Return what is to be said where a plain row of fewer steps was no faster than one of more."""
    plain = [row for row in rows if is_baseline(row) and row.get("speedup") is not None]
    plain.sort(key=lambda row: (str(row.get("sampler")), -(read(row["method"]).steps or math.inf)))
    pairs = [
        f"{row_label(slow)} {slow['speedup']:.2f}x and {row_label(fast)} {fast['speedup']:.2f}x"
        for slow, fast in pairwise(plain)
        if slow.get("sampler") == fast.get("sampler") and slow["speedup"] >= fast["speedup"]
    ]
    if not pairs:
        return ""
    return (
        f"Times don't follow the steps ({'; '.join(pairs)}): the machine did something else, too, so nothing "
        "is said by time. Measure again, with another --out."
    )


_NOTE = (
    "change: against the baseline, same seeds, ± half of a 95% interval; ≈ marks a change inside the noise. "
    "Intervals are a bootstrap's over captions, or Student's t; below 30 images or captions there are none. "
    "Perceptual distances are geometric means, of EfficientNet-Lite0's features{distances}. Gain: what fewer "
    "steps of the same sampler cost at the same distance, over the row's own cost; best plain sampler: what "
    "the cheapest of all baseline's rows costs there; a row marked no is the worse buy. > and <: fewer steps "
    "were not measured that near, or that far. Speed-ups are against baseline with the attention named in "
    "the row. GB/img is the growth of the peak of GPU memory when the batch grows by 1, denoising and "
    "decoding together; where decoding takes more, it hides what denoising saves."
)


def note(features: str | None) -> str:
    """Return what stands below the tables of a run that was measured by these features."""
    if features == "inception":
        return _NOTE.format(distances="; FID and KID are of pytorch-fid's Inception v3")
    return _NOTE.format(distances=", and so are FD and KID")
