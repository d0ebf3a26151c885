"""Distances between two sets of pictures: folders, or features that a table kept."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from rich.console import Console

from ..errors import EvalError
from ..pages.output import check_writable, progress
from ..pages.rows import Column, Row, distance_name, figure, to_terminal
from ..pictures.models import find_device
from ..settings import FidSettings
from . import metrics
from .feature_file import SUFFIX, load_features
from .features import check_network, features_of, load_network, picture_files
from .projection import frechet_features


def command(settings: FidSettings, console: Console) -> None:
    """Print the distances."""
    sets = sets_of((settings.first, settings.second), settings)
    if any(isinstance(part, list) for part in sets):
        check_network(settings.features, settings.inception_weights)
    with progress(console) as bars:
        task = bars.add_task("features", total=sum(map(len, sets)))
        row = distances(sets, settings, lambda count: bars.advance(task, count))
    console.print(to_terminal(f"{settings.first} and {settings.second}", [row], columns(settings)))


def sets_of(places: Sequence[Path], settings: FidSettings) -> list[list[Path] | np.ndarray]:
    """Return for each place the pictures of a folder, or the features (N, D) of a table's file.

    Raises EvalError if there are fewer than 2, or the file is of another network.
    """
    sets: list[list[Path] | np.ndarray] = []
    for place in places:
        if place.suffix != SUFFIX:
            sets.append(picture_files(place))
            continue
        features = load_features(place, settings.features)
        if len(features) < 2:
            raise EvalError(f"{place} holds features of {len(features)} pictures; a distance needs 2 or more")
        sets.append(features)
    return sets


def distances(
    sets: Sequence[list[Path] | np.ndarray], settings: FidSettings, tick: Callable[[int], None]
) -> Row:
    """Return the Frechet and KID of two sets.

    Pictures are taken as they are (Inception resizes them itself). The KID takes as many of
    each as the smaller set has. `tick` is called with the number of pictures done.
    """
    check_writable(settings.cache / "features")
    network = None
    if any(isinstance(part, list) for part in sets):
        network = load_network(settings.features, find_device(settings.device), settings.inception_weights)
    features = []
    for part in sets:
        if isinstance(part, list):
            assert network is not None
            features.append(features_of(network, part, settings.cache, tick=tick))
        else:
            features.append(part)
            tick(len(part))
    a, b = features
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
