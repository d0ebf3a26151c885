"""Distances between two folders of pictures."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from . import metrics
from .config import FidSettings
from .features import features_of, load_network, picture_files
from .models import find_device
from .output import check_writable
from .results import Column, Row, distance_name, figure


def pictures_of(first: Path, second: Path) -> list[list[Path]]:
    """Return the pictures in two folders. Raises EvalError if one has fewer than 2."""
    return [picture_files(folder) for folder in (first, second)]


def distances(pictures: Sequence[Sequence[Path]], settings: FidSettings, tick: Callable[[int], None]) -> Row:
    """Return the Frechet and kernel distance of two sets of pictures.

    Pictures are taken as they are (Inception resizes them itself). The kernel distance takes as many of
    each as the smaller set has. `tick` is called with the number of pictures done.
    """
    check_writable(settings.cache / "features")
    network = load_network(settings.features, find_device(settings.device), settings.inception_weights)
    a, b = (features_of(network, part, settings.cache, tick=tick) for part in pictures)
    count = min(len(a), len(b))
    row: Row = {"images": f"{len(a)} / {len(b)}"}
    row["frechet"] = metrics.frechet_distance(metrics.fit(a), metrics.fit(b))
    if count >= 3:
        random = np.random.default_rng(0)
        picked = [part[random.permutation(len(part))[:count]] for part in (a, b)]
        kernel = metrics.kernel_distance(*picked)
        row |= {"kernel": 1e3 * kernel.value, "kernel_error": 1e3 * kernel.error}
    return row


def columns(settings: FidSettings) -> list[Column]:
    """Return the columns to print."""
    return [
        Column("images", figure("images", "")),
        Column(distance_name(settings.features), figure("frechet", ".3f")),
        Column("kernel x1000", figure("kernel", ".3f")),
        Column("s.e.", figure("kernel_error", ".3f")),
    ]
