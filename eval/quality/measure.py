"""From images to rows: distances to real, baseline and reference images, and what the images show."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from ..images.prompts import ImageSpec
from ..settings import RunSettings
from . import fidelity, metrics
from .encoders import ClipScore
from .features import Network, features_of, frechet_features, load_network
from .perceptual import PerceptualFeatures, StageFeatures
from .real import Real
from .summary import summary_of

_SPLITS = 5
_FEWEST = 3  # images that a KID without one of them needs
Row = dict[str, Any]


class Files(Sequence[Image.Image]):
    """Images on disk, each opened when it is read: 2,000 at 512 px would take 1.6 GB."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: Any) -> Any:
        """Return an image, or images, RGB."""
        if isinstance(index, slice):
            return [Image.open(path).convert("RGB") for path in self.paths[index]]
        return Image.open(self.paths[index]).convert("RGB")


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

    def features(self, images: Sequence[Image.Image] | Sequence[Path]) -> np.ndarray:
        """Return features (N, D)."""
        return features_of(self.network, images, self.cache)

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
    features = features_of(by.network, real.images, real.cache, real.crop, report)
    return RealFeatures(features, metrics.fit(by.projected(features)), metrics.KernelSet(features))


class Shown:
    """The images of one row: their key, features (N, D) and perceptual features, each computed once."""

    def __init__(self, key: str, images: Sequence[Image.Image], by: Metrics) -> None:
        self.key, self.images, self._by = key, images, by

    @cached_property
    def features(self) -> np.ndarray:
        """Features (N, D) of the network of FD and KID."""
        return self._by.features(self.images.paths if isinstance(self.images, Files) else self.images)

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
    enough, real = len(shown.images) >= _FEWEST, beside.real
    kernel = metrics.kernel_distance
    return Measured(
        shown.key,
        measure_each(shown, asked, beside, by),
        metrics.FrechetSample(by.projected(shown.features), real.gaussian) if real else None,
        kernel(shown.features, real.kernels) if real and enough else None,
    )


def measure_each(shown: Shown, asked: Sequence[ImageSpec], beside: References, by: Metrics) -> list[Row]:
    """Return a row for each image alone."""
    count, is_baseline = len(shown.images), shown is beside.baseline
    nothing: Sequence[Any] = [None] * count
    to_baseline = nothing if is_baseline else shown.perceptual.distance(beside.baseline.perceptual)
    reference = (
        nothing if beside.reference is None else shown.perceptual.distance(beside.reference.perceptual)
    )
    clip = nothing if by.clip is None else by.clip(shown.images, [spec.prompt for spec in asked])
    rows = []
    for i, spec in enumerate(asked):
        pair = shown.images[i], beside.baseline.images[i]
        row = {
            "method": shown.key,
            "index": spec.index,
            "seed": spec.seed,
            "prompt": spec.prompt,
            "baseline_distance": _number(to_baseline[i]),
            "reference_distance": _number(reference[i]),
            "psnr": None if is_baseline else fidelity.psnr(*pair),
            "clip": _number(clip[i]),
        }
        rows.append(row)
    return rows


def row_of(ours: Measured, baseline: Measured) -> Row:
    """Return a row: distances, means over the images, and changes against the baseline of the same seeds."""
    other = None if ours.key == baseline.key else baseline
    count = len(ours.singles)
    row: Row = {}
    if ours.frechet is not None:
        everyone = np.arange(count)
        row["fd"] = ours.frechet.distance(everyone)
        if other is not None and other.frechet is not None:
            row["fd_change"] = row["fd"] - other.frechet.distance(everyone)
            row["fd_change_error"] = metrics.frechet_difference_error(ours.frechet, other.frechet)
    row |= _kernel_row("kid", ours.kid, other and other.kid)
    return row | summary_of(ours.singles, other.singles if other else None) | {"images": count}


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


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def _kernel_row(name: str, ours: metrics.KernelDistance | None, baseline: Any) -> Row:
    """A KID as `name`, and its change against the baseline's."""
    if ours is None:
        return {}
    row = {name: ours.value, f"{name}_error": ours.error}
    if baseline is not None:
        row[f"{name}_change"] = ours.value - baseline.value
        row[f"{name}_change_error"] = ours.difference_error(baseline)
    return row
