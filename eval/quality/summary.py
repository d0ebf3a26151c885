"""A row's figures from those of its images: means, their errors, and changes against the baseline's same
seeds."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from . import metrics

Row = dict[str, Any]


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
    return means | _clip(rows, baseline)


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


def _clip(rows: Sequence[Row], baseline: Sequence[Row] | None) -> Row:
    """Return the mean CLIP score, and its change against the baseline's."""
    values = np.array([row["clip"] for row in rows if row.get("clip") is not None])
    if not len(values):
        return {}
    found: Row = {"clip": float(values.mean())}
    if baseline is not None:
        change = values - np.array([row["clip"] for row in baseline])
        found |= {"clip_change": float(change.mean()), "clip_change_error": metrics.standard_error(change)}
    return found
