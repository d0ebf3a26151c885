"""A row's figures from those of its images: means, their errors, and changes against the baseline's same
seeds."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..intervals import captions_of, interval, standard_error

Row = dict[str, Any]


def summary_of(rows: Sequence[Row], baseline: Sequence[Row] | None) -> Row:
    """Return means over the images; `baseline` are the same seeds' rows, or None for the baseline's own.

    Perceptual distances are geometric means: a few images of a run become another image.
    Images that equal the baseline's are counted (`equal_images`), and are in no mean of PSNR or distance;
    where all of them do, the distance is 0 and there is no PSNR.
    """
    means: Row = {}
    for key in ("baseline_distance", "reference_distance"):
        means |= _distance(key, [row for row in rows if row.get(key) is not None])
    ratios = [row["psnr"] for row in rows if row.get("psnr") is not None and row["psnr"] < np.inf]
    if ratios:
        means["psnr"] = float(np.mean(ratios))
    if equal := sum(row.get("psnr") == np.inf for row in rows):
        means["equal_images"] = equal
    return means | _clip(rows, baseline)


def _distance(key: str, rows: Sequence[Row]) -> Row:
    """Return the geometric mean of distances and its 95% interval; of equal images' alone it is 0."""
    apart = [row for row in rows if row[key] > 0]
    if not apart:
        return {key: 0.0} if rows else {}
    logs = np.log([row[key] for row in apart])
    found = {key: float(np.exp(logs.mean()))}
    ends = interval(lambda counts: np.exp(counts @ logs / counts.sum(1)), captions_of(apart))
    return found if ends is None else found | {f"{key}_low": ends[0], f"{key}_high": ends[1]}


def _clip(rows: Sequence[Row], baseline: Sequence[Row] | None) -> Row:
    """Return the mean CLIP score, and its change against the baseline's."""
    values = np.array([row["clip"] for row in rows if row.get("clip") is not None])
    if not len(values):
        return {}
    found: Row = {"clip": float(values.mean())}
    if baseline is not None:
        change = values - np.array([row["clip"] for row in baseline])
        found |= {
            "clip_change": float(change.mean()),
            "clip_change_error": standard_error(change, captions_of(rows)),
        }
    return found
