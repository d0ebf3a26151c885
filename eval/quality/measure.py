"""From images to rows: distances to real, baseline and reference images, and what the images show."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..images.prompts import ImageSpec
from ..settings import RunSettings
from . import fidelity, metrics
from .encoders import ClipScore
from .features import Network, Sources, features_of, frechet_features, load_network, open_image, user_cache
from .perceptual import PerceptualFeatures, StageFeatures
from .real import Real
from .summary import summary_of

_SPLITS = 5
_FEWEST = 3  # images that a KID without one of them needs
Row = dict[str, Any]


@dataclass(frozen=True)
class Metrics:
    """The networks that images are measured by, loaded once.

    Attributes:
        network: features of FD and KID.
        stages: features of the perceptual distance.
        clip: the CLIP score, if asked for.
        scenes: whether images are the toy model's.
        cache: folder of features.
    """

    network: Network
    stages: StageFeatures
    clip: ClipScore | None
    scenes: bool
    cache: Path

    def projected(self, features: np.ndarray) -> np.ndarray:
        """Return what a FD is of."""
        return frechet_features(features, self.network.name, self.scenes)


def load_metrics(settings: RunSettings, device: torch.device) -> Metrics:
    """Return the networks of the settings. Raises EvalError if one can't be loaded."""
    return Metrics(
        load_network(settings.features, device),
        StageFeatures(device),
        ClipScore(settings.clip, device) if settings.clip else None,
        settings.model == "demo",
        settings.out / "features",
    )


@dataclass(frozen=True)
class RealFeatures:
    """Features (M, D) of real images, and their Gaussian and kernel sums."""

    features: np.ndarray
    gaussian: metrics.Gaussian
    kernels: metrics.KernelSet


def read_real(real: Real, by: Metrics, report: Callable[[int], Any]) -> RealFeatures:
    """Return the features of real images. `report` is called with the number of images done."""
    features = features_of(by.network, real.images, user_cache() / "features", real.crop, report)
    return RealFeatures(features, metrics.fit(by.projected(features)), metrics.KernelSet(features))


class Shown:
    """The images of one row, or their files: their key, and features that are computed once."""

    def __init__(self, key: str, images: Sources, by: Metrics) -> None:
        self.key, self.images, self._by = key, images, by

    @cached_property
    def features(self) -> np.ndarray:
        """Features (N, D) of the network of FD and KID."""
        return features_of(self._by.network, self.images, self._by.cache)

    @cached_property
    def perceptual(self) -> PerceptualFeatures:
        """Features of the perceptual distance."""
        return PerceptualFeatures(self._by.stages, self.images)


@dataclass(frozen=True)
class References:
    """What rows are compared with.

    Attributes:
        baseline: the baseline's images.
        reference: the baseline's of many steps, or None.
        real: real images, or None.
    """

    baseline: Shown
    reference: Shown | None = None
    real: RealFeatures | None = None


@dataclass(frozen=True)
class Measured:
    """The figures of one row's images, each image alone (`singles`) and together."""

    key: str
    singles: list[Row]
    frechet: metrics.FrechetSample | None = None
    kid: metrics.KernelDistance | None = None


def measure(shown: Shown, asked: Sequence[ImageSpec], beside: References, by: Metrics) -> Measured:
    """Return the figures of a row's images; those of the baseline are made in the same way."""
    singles, real = measure_each(shown, asked, beside, by), beside.real
    if real is None:
        return Measured(shown.key, singles)
    enough = len(shown.images) >= _FEWEST
    return Measured(
        shown.key,
        singles,
        metrics.FrechetSample(by.projected(shown.features), real.gaussian),
        metrics.kernel_distance(shown.features, real.kernels) if enough else None,
    )


def measure_each(shown: Shown, asked: Sequence[ImageSpec], beside: References, by: Metrics) -> list[Row]:
    """Return a row for each image alone; the baseline is not compared with itself."""
    baseline = None if shown is beside.baseline else beside.baseline
    figures: dict[str, Any] = {}
    for name, other in (("baseline_distance", baseline), ("reference_distance", beside.reference)):
        figures[name] = shown.perceptual.distance(other.perceptual) if other else []
    others = baseline.images if baseline else ()
    figures["psnr"] = [
        fidelity.psnr(open_image(ours), open_image(other))
        for ours, other in zip(shown.images, others, strict=False)
    ]
    figures["clip"] = by.clip(shown.images, [spec.prompt for spec in asked]) if by.clip else []
    return [
        {"method": shown.key, "index": spec.index, "seed": spec.seed, "prompt": spec.prompt}
        | {name: float(values[i]) if len(values) else None for name, values in figures.items()}
        for i, spec in enumerate(asked)
    ]


def row_of(ours: Measured, baseline: Measured) -> Row:
    """Return a row: distances, means over the images, and changes against the baseline of the same seeds."""
    other = None if ours.key == baseline.key else baseline
    row: Row = {}
    if ours.frechet is not None:
        everyone = np.arange(len(ours.singles))
        row["fd"] = ours.frechet.distance(everyone)
        if other is not None and other.frechet is not None:
            row["fd_change"] = row["fd"] - other.frechet.distance(everyone)
            row["fd_change_error"] = metrics.frechet_difference_error(ours.frechet, other.frechet)
    if ours.kid is not None:
        row |= {"kid": ours.kid.value, "kid_error": ours.kid.error}
        if other is not None and other.kid is not None:
            row["kid_change"] = ours.kid.value - other.kid.value
            row["kid_change_error"] = ours.kid.difference_error(other.kid)
    means = summary_of(ours.singles, other.singles if other else None)
    return row | means | {"images": len(ours.singles)}


def floor_of(real: RealFeatures, count: int, by: Metrics) -> Row | None:
    """Return the distances of real images to other real images, means over random splits.

    As many are taken as a row has images, at most half of all; None if those are too few.
    """
    count = min(count, len(real.features) // 2)
    if count < _FEWEST:
        return None
    random = np.random.default_rng(0)
    frechet, kernel = [], []
    for _ in range(_SPLITS):
        picked = random.permutation(len(real.features))[:count]
        some, rest = by.projected(real.features[picked]), by.projected(np.delete(real.features, picked, 0))
        frechet.append(metrics.FrechetSample(some, metrics.fit(rest)).distance(np.arange(count)))
        kernel.append(real.kernels.split_distance(picked))
    return {
        "method": "real/real",
        "ratio": None,
        "backend": None,
        "images": count,
        "fd": float(np.mean(frechet)),
        "kid": float(np.mean(kernel)),
        "kid_error": float(np.std(kernel, ddof=1)),
    }
