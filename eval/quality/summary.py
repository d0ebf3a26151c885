"""A row's figures from those of its pictures: means, their errors, and changes against the baseline's same
seeds."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from . import metrics

Row = dict[str, Any]
_SHARES = (
    ("right", "seen"),
    ("right", "heldout triple"),
    ("right", "heldout pair"),
    ("right_style", None),
    ("right_colour", None),
    ("clip", None),
)


def summary_of(rows: Sequence[Row], baseline: Sequence[Row] | None) -> Row:
    """Return means over the pictures; `baseline` are the same seeds' rows, or None for the baseline's own.

    Perceptual distances and grain are geometric means: a few pictures of a run become another picture.
    """
    means: Row = {}
    for key in ("baseline_distance", "reference_distance"):
        values = np.array([row[key] for row in rows if row.get(key) is not None])
        if len(values) > 1:
            logs = np.log(np.maximum(values, 1e-12))
            half = metrics.Z95 * metrics.standard_error(logs)
            middle = logs.mean()
            for name, log in ((key, middle), (f"{key}_low", middle - half), (f"{key}_high", middle + half)):
                means[name] = float(np.exp(log))
    for key in ("psnr", "ssim"):
        values = np.array([row[key] for row in rows if row.get(key) is not None])
        if len(values):
            means[key] = float(values.mean())
    if baseline is not None and all(row.get("high_frequency") for row in (*rows, *baseline)):
        ratios = np.log(
            [row["high_frequency"] / old["high_frequency"] for row, old in zip(rows, baseline, strict=True)]
        )
        means["high_frequency"] = float(np.exp(ratios.mean()))
        if len(ratios) > 1:
            means["high_frequency_error"] = float(means["high_frequency"] * metrics.standard_error(ratios))
    for key, split in _SHARES:
        means |= _share(rows, baseline, key, split)
    return means


def _share(rows: Sequence[Row], baseline: Sequence[Row] | None, key: str, split: str | None) -> Row:
    name = key if split is None else f"{key} {split}".replace(" ", "_")
    pairs = [
        (ours[key], theirs[key])
        for ours, theirs in zip(rows, rows if baseline is None else baseline, strict=True)
        if split in (None, ours["split"]) and ours.get(key) is not None
    ]
    if not pairs:
        return {}
    values = np.array(pairs, dtype=np.float64)
    share: Row = {name: float(values[:, 0].mean()), f"{name}_count": len(pairs)}
    if baseline is not None:
        change = values[:, 0] - values[:, 1]
        share[f"{name}_change"] = float(change.mean())
        if len(pairs) > 1:
            share[f"{name}_change_error"] = metrics.standard_error(change)
    return share
