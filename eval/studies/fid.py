"""FID and KID between two folders of images."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from torchmetrics.image.fid import FrechetInceptionDistance

from agentsd.progress import progress

from ..files import image_files
from ..images.models import find_device
from ..intervals import FEWEST
from ..pages.rows import Column, Row, distance_name, figure, to_terminal
from ..quality import metrics
from ..quality.features import features_of, load_network, pytorch_fid, user_cache
from ..settings import FidSettings


def command(settings: FidSettings, console: Console) -> None:
    """Print the distances."""
    sets = [image_files(folder) for folder in (settings.first, settings.second)]
    if settings.features == "inception":
        pytorch_fid()
    with progress(console) as bars:
        task = bars.add_task("features", total=sum(map(len, sets)))
        row = distances(sets, settings, lambda count: bars.advance(task, count))
    columns = [
        Column("images", figure("images", "")),
        Column(distance_name(settings.features, scenes=False), figure("fd", ".3f")),
        Column("KID x1000 ± s.e.", figure("kid", "")),
    ]
    console.print(to_terminal(f"{settings.first} and {settings.second}", [row], columns))


def distances(sets: Sequence[Sequence[Path]], settings: FidSettings, report: Callable[[int], object]) -> Row:
    """Return the FID and KID of two sets of images.

    Images are taken as they are (Inception resizes them itself). `report` is called with the images done.
    """
    network = load_network(settings.features, find_device(settings.device))
    cache = user_cache() / "features"
    first, second = (features_of(network, paths, cache, report=report) for paths in sets)
    row: Row = {"images": f"{len(first)} / {len(second)}", "fd": frechet_distance(first, second)}
    kernel, few = metrics.kernel_distance(first, second), min(len(first), len(second)) < FEWEST
    row["kid"] = f"{1e3 * kernel.value:.3f}" + (f" ± {1e3 * kernel.error:.3f}" if not few else "")
    return row


def frechet_distance(first: np.ndarray, second: np.ndarray) -> float:
    """Return the FID of torchmetrics, in float64, of features (N, D) and (M, D)."""
    given = torch.nn.Identity()
    given.num_features = first.shape[1]
    metric = FrechetInceptionDistance(given).set_dtype(torch.float64)
    for features, are_real in ((first, False), (second, True)):
        metric.update(torch.tensor(features, dtype=torch.float64), real=are_real)
    return float(metric.compute())
