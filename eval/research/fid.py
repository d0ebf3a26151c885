"""FD and KID between two folders of images."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from rich.console import Console

from ..files import check_writable
from ..images.models import find_device
from ..pages.rows import Column, Row, distance_name, figure, progress, to_terminal
from ..quality import metrics
from ..quality.features import features_of, frechet_features, image_files, load_network, pytorch_fid
from .settings import FidSettings


def command(settings: FidSettings, console: Console) -> None:
    """Print the distances."""
    sets = [image_files(folder) for folder in (settings.first, settings.second)]
    if settings.features == "inception":
        pytorch_fid()
    with progress(console) as bars:
        task = bars.add_task("features", total=sum(map(len, sets)))
        row = distances(sets, settings, lambda count: bars.advance(task, count))
    console.print(to_terminal(f"{settings.first} and {settings.second}", [row], columns(settings)))


def distances(sets: Sequence[Sequence[Path]], settings: FidSettings, report: Callable[[int], object]) -> Row:
    """Return the FD and KID of two sets of images.

    Images are taken as they are (Inception resizes them itself). The KID takes as many of each as the smaller
    set has. `report` is called with the number of images done.
    """
    check_writable(settings.cache / "features")
    network = load_network(settings.features, find_device(settings.device))
    a, b = (features_of(network, part, settings.cache, report=report) for part in sets)
    count = min(len(a), len(b))
    row: Row = {"images": f"{len(a)} / {len(b)}"}
    fits = (metrics.fit(frechet_features(part, settings.features)) for part in (a, b))
    row["fd"] = metrics.frechet_distance(*fits)
    if count >= 3:
        random = np.random.default_rng(0)
        picked = [part[random.permutation(len(part))[:count]] for part in (a, b)]
        kernel = metrics.kernel_distance(*picked)
        row |= {"kid": 1e3 * kernel.value, "kid_error": 1e3 * kernel.error}
    return row


def columns(settings: FidSettings) -> list[Column]:
    """Return the columns to print."""
    return [
        Column("images", figure("images", "")),
        Column(distance_name(settings.features), figure("fd", ".3f")),
        Column("KID x1000", figure("kid", ".3f")),
        Column("s.e.", figure("kid_error", ".3f")),
    ]
