"""From images to rows: distances to real, baseline and reference images, and what the images show."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from ..images.prompts import ImageSpec
from ..intervals import captions_of
from ..settings import RunSettings
from . import fidelity, metrics
from .encoders import ClipScore
from .features import Sources, features_of, frechet_features, load_network, open_image, user_cache
from .perceptual import PerceptualFeatures, StageFeatures
from .real import Real
from .summary import summary_of

_SPLITS = 5
_FEWEST = 3  # images that a KID without one of them needs
Row = dict[str, Any]


class Shown:
    """The images of one row, or their files: their key, and features that are computed once."""

    def __init__(self, key: str, images: Sources, by: "Judge") -> None:
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
class Measured:
    """The figures of one row's images, each image alone (`singles`) and together."""

    key: str
    singles: list[Row]
    frechet: metrics.FrechetSample | None = None
    kid: metrics.KernelDistance | None = None


class Judge:
    """The networks that images are measured by, loaded once, and the images that rows are compared with.

    Attributes:
        network: features of FD and KID.
        stages: features of the perceptual distance.
        clip: the CLIP score, if asked for.
        scenes: whether images are the toy model's.
        cache: folder of features.
        real: features (M, D) of real images, or None; `gaussian` and `kernels` are theirs.
        baseline: the baseline's images.
        reference: the baseline's of many steps, or None.

    Raises EvalError if a network can't be loaded.
    """

    def __init__(self, settings: RunSettings, device: torch.device) -> None:
        self.network = load_network(settings.features, device)
        self.stages = StageFeatures(device)
        self.clip = ClipScore(settings.clip, device) if settings.clip else None
        self.scenes = settings.model == "demo"
        self.cache = settings.out / "features"
        self.real: np.ndarray | None = None
        self.baseline: Shown | None = None
        self.reference: Shown | None = None

    def projected(self, features: np.ndarray) -> np.ndarray:
        """Return what a FD is of."""
        return frechet_features(features, self.network.name, self.scenes)

    def read_real(self, real: Real, report: Callable[[int], Any]) -> None:
        """Take real images. `report` is called with the number of images done."""
        cache = user_cache() / "features"
        self.real = features_of(self.network, real.images, cache, real.crop, report)
        self.gaussian = metrics.fit(self.projected(self.real))
        self.kernels = metrics.KernelSet(self.real)

    def measure(self, shown: Shown, asked: Sequence[ImageSpec]) -> Measured:
        """Return the figures of a row's images; those of the baseline are made in the same way."""
        singles = self._each(shown, asked)
        if self.real is None:
            return Measured(shown.key, singles)
        captions = [spec.prompt for spec in asked]
        frechet = metrics.FrechetSample(self.projected(shown.features), self.gaussian, captions)
        if min(len(shown.images), len(self.real)) < _FEWEST:
            return Measured(shown.key, singles, frechet)
        kid = metrics.kernel_distance(shown.features, self.kernels, captions)
        return Measured(shown.key, singles, frechet, kid)

    def _each(self, shown: Shown, asked: Sequence[ImageSpec]) -> list[Row]:
        """Return a row for each image alone; the baseline is not compared with itself."""
        baseline = None if shown is self.baseline else self.baseline
        figures: dict[str, Any] = {}
        for name, other in (("baseline_distance", baseline), ("reference_distance", self.reference)):
            figures[name] = shown.perceptual.distance(other.perceptual) if other else []
        pairs: Any = zip(shown.images, baseline.images, strict=True) if baseline else ()
        figures["psnr"] = [fidelity.psnr(*map(open_image, pair)) for pair in pairs]
        figures["clip"] = self.clip(shown.images, [spec.prompt for spec in asked]) if self.clip else []
        return [
            {"method": shown.key, "index": spec.index, "seed": spec.seed, "prompt": spec.prompt}
            | {name: float(values[i]) if len(values) else None for name, values in figures.items()}
            for i, spec in enumerate(asked)
        ]

    def floor(self, count: int) -> Row | None:
        """Return the distances of real images to other real images, means over random splits.

        As many are taken as a row has images, at most half of all; None if those are too few.
        """
        if self.real is None or (count := min(count, len(self.real) // 2)) < _FEWEST:
            return None
        random = np.random.default_rng(0)
        frechet, kernel = [], []
        for _ in range(_SPLITS):
            picked = random.permutation(len(self.real))[:count]
            some, rest = self.real[picked], np.delete(self.real, picked, 0)
            sample = metrics.FrechetSample(self.projected(some), metrics.fit(self.projected(rest)))
            frechet.append(sample.distance(np.arange(count)))
            kernel.append(self.kernels.split_distance(picked))
        return {
            "method": "real/real",
            "ratio": None,
            "backend": None,
            "images": count,
            "fd": float(np.mean(frechet)),
            "kid": float(np.mean(kernel)),
            "kid_error": float(np.std(kernel, ddof=1)),
        }


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
    return row | means | {"images": len(ours.singles), "captions": len(set(captions_of(ours.singles)))}
