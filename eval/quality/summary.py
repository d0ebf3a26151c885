"""A row's figures from those of its images: means, their errors, and changes against the baseline's same
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
    ("right_colour", None),
    ("clip", None),
)


def summary_of(rows: Sequence[Row], baseline: Sequence[Row] | None) -> Row:
    """Return means over the images; `baseline` are the same seeds' rows, or None for the baseline's own.

    Perceptual distances are geometric means: a few images of a run become another image.
    Images that equal the baseline's are counted (`equal_images`), and are in no mean of PSNR or distance;
    where all of them do, the distance is 0 and there is no PSNR.
    """
    means: Row = {}
    for key in ("baseline_distance", "reference_distance"):
        means |= _distance(key, [row[key] for row in rows if row.get(key) is not None])
    ratios = [row["psnr"] for row in rows if row.get("psnr") is not None and row["psnr"] < np.inf]
    if ratios:
        means["psnr"] = float(np.mean(ratios))
    if equal := sum(row.get("psnr") == np.inf for row in rows):
        means["equal_images"] = equal
    for key, split in _SHARES:
        means |= _share(rows, baseline, key, split)
    return means


def _distance(key: str, values: Sequence[float]) -> Row:
    """Return the geometric mean of distances and its 95% interval; of equal images' alone it is 0."""
    names = key, f"{key}_low", f"{key}_high"
    logs = np.log([value for value in values if value > 0])
    if len(values) and not len(logs):
        return dict.fromkeys(names, 0.0)
    if len(logs) < 2:
        return {}
    half, middle = metrics.Z95 * metrics.standard_error(logs), logs.mean()
    return {name: float(np.exp(middle + sign * half)) for name, sign in zip(names, (0, -1, 1), strict=True)}


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
