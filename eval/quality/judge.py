"""The quality figures of a row: distances to real, baseline's and reference images, and what they show."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

from ..pictures.methods import Method
from ..pictures.prompts import Picture
from ..pictures.store import Store
from ..settings import RunSettings
from . import fidelity, metrics
from .clip import ClipScore
from .feature_file import SUFFIX, save_features
from .features import Network, features_of, load_network
from .grain import grain
from .perceptual import Looks, StageFeatures
from .projection import frechet_features
from .real import Real, user_cache
from .summary import summary_of

_SPLITS = 5
_FEWEST = 3  # pictures that a KID without one of them needs
_KEPT = 10_000  # references whose features are kept with a table: 50,000 of Inception's are 200 MB
Row = dict[str, Any]
Tick = Callable[[int], Any]
Harm = Callable[[Image.Image], Image.Image]
"""What is done to a picture to make it worse by a known strength."""


@dataclass(frozen=True)
class Compared:
    """What rows are compared with, all of it made by the baseline.

    Attributes:
        baseline: the method without any.
        reference: baseline of many steps, or None.
        others: the baseline's pictures of the same prompts under other seeds, or none.
    """

    baseline: Method
    reference: Method | None = None
    others: Sequence[Picture] = ()


class Files(Sequence[Image.Image]):
    """Pictures on disk, each opened when it is looked at: 2,000 at 512 px would take 1.6 GB."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, place: Any) -> Any:
        """Return a picture, or pictures, RGB."""
        if isinstance(place, slice):
            return [Image.open(path).convert("RGB") for path in self._paths[place]]
        return Image.open(self._paths[place]).convert("RGB")


@dataclass
class Judge:
    """Figures of every method of a run against the same real pictures and the same baseline pictures."""

    settings: RunSettings
    pictures: Sequence[Picture]
    real: Real | None
    device: torch.device
    network: Network = field(init=False)
    real_features: np.ndarray = field(init=False)
    """Features (M, D) of the real pictures, once they are read."""

    def __post_init__(self) -> None:
        self.network = load_network(self.settings.features, self.device, self.settings.inception_weights)
        self._stages = StageFeatures(self.device)
        self._clip = ClipScore(self.settings.clip, self.device) if self.settings.clip else None
        self._cache = self.settings.out / "features"
        self._reader = scene_reader(self.pictures, self.device)
        self.kernels: dict[str, metrics.KernelDistance] = {}

    def read_real(self, tick: Tick) -> None:
        """Read the real pictures, before any picture is made: one that can't be read ends the run early."""
        if self.real is not None:
            real = self.real
            self.real_features = features_of(self.network, real.pictures, real.cache, real.crop, tick)
            self._moments = metrics.moments(self._projected(self.real_features))
            self._reference = self._moments.gaussian
            self._kernel_reference = metrics.KernelSet(self.real_features)

    def _projected(self, features: np.ndarray) -> np.ndarray:
        return frechet_features(features, self.network.name)

    def floor(self) -> Row | None:
        """Return the distances of real pictures to other real pictures, means over random splits.

        As many are taken as a row has pictures, at most half of all; None if those are too few.
        """
        if self.real is None:
            return None
        count = min(len(self.pictures), len(self.real_features) // 2)
        if count < _FEWEST:
            return None
        random = np.random.default_rng(0)
        frechet, kernel = [], []
        for _ in range(_SPLITS):
            picked = random.permutation(len(self.real_features))[:count]
            some = self._projected(np.asarray(self.real_features)[picked])
            rest = self._moments.without(metrics.moments(some, self._moments.origin)).gaussian
            frechet.append(metrics.FrechetSample(some, rest).distance(np.arange(count)))
            kernel.append(self._kernel_reference.split_distance(picked))
        return {
            "method": "real/real",
            "ratio": None,
            "backend": None,
            "images": count,
            "fd": float(np.mean(frechet)),
            "kid": float(np.mean(kernel)),
            "kid_error": float(np.std(kernel, ddof=1)),
        }

    def judge(
        self,
        store: Store,
        methods: Sequence[Method],
        compared: Compared,
        tick: Tick,
        harms: Mapping[str, Harm] = MappingProxyType({}),
    ) -> tuple[list[Row], list[Row]]:
        """Return a row for each method and then for each harm to the baseline's pictures, and one for each
        picture.

        The features of the baseline's pictures, the default's and a folder's real ones are written to
        `features/` in
        the run's folder: what is small enough to be kept with a table.
        """

        def shown_by(method: Method, pictures: Sequence[Picture] = self.pictures) -> Shown:
            paths = [store.path(method, picture.index) for picture in pictures]
            found = features_of(self.network, paths, self._cache) if paths else np.zeros((0, 0))
            return Shown(method.key, Files(paths), found)

        baseline = shown_by(compared.baseline)
        against = Against(
            baseline,
            Looks(self._stages, baseline.images),
            None if compared.reference is None else Looks(self._stages, shown_by(compared.reference).images),
            metrics.KernelSet(shown_by(compared.baseline, compared.others).features)
            if len(compared.others) >= _FEWEST
            else None,
        )
        rows, singles = [], []
        kept = {}
        if self.settings.reference and len(self.real_features) <= _KEPT:
            kept["real"] = self.real_features
        for method in methods:
            shown = baseline if method == compared.baseline else shown_by(method)
            row, single = self.row_of(shown, against)
            rows.append(row)
            singles += single
            if method.is_baseline or method.is_default:
                kept[method.key] = shown.features
            tick(len(self.pictures))
        for name, harm in harms.items():
            images = [harm(image) for image in baseline.images]
            row, single = self.row_of(Shown(name, images, self._features_of(images)), against)
            rows.append(row)
            singles += single
        for name, vectors in kept.items():
            save_features(self._cache / f"{name}{SUFFIX}", self.network.name, vectors)
        return rows, singles

    def _features_of(self, images: Sequence[Image.Image]) -> np.ndarray:
        return features_of(self.network, images, self._cache)

    def row_of(self, shown: "Shown", against: "Against") -> tuple[Row, list[Row]]:
        """Return the figures of a row, and those of each of its pictures."""
        single = self._each(shown, against)
        if shown is against.baseline:
            against.baseline_rows = single
        row = self._distribution(shown, against) | summary_of(
            single, None if shown is against.baseline else against.baseline_rows
        )
        if self.real is not None and self.real.measures is not None:
            from .scenes import place_distance

            seen = [(r["x"], r["y"], r["side"]) for r in single if r.get("side") is not None]
            if len(seen) >= _FEWEST:
                row["place"], row["size"] = place_distance(np.array(seen), self.real.measures)
        return row | {"images": len(shown.images)}, single

    def _each(self, shown: "Shown", against: "Against") -> list[Row]:
        """Return the figures of each picture alone."""
        looks = Looks(self._stages, shown.images)
        is_baseline = shown is against.baseline
        nothing: Sequence[Any] = [None] * len(shown.images)
        to_baseline = nothing if is_baseline else looks.distance(against.looks)
        reference = nothing if against.reference is None else looks.distance(against.reference)
        fits = nothing if self._clip is None else self._clip(shown.images, [p.prompt for p in self.pictures])
        read: Sequence[Row] = [{}] * len(shown.images)
        if self._reader is not None:
            from .scenes import read_pictures

            read = read_pictures(shown.images, [p.triple for p in self.pictures if p.triple], self._reader)
        rows = []
        for i, (picture, ours) in enumerate(zip(self.pictures, shown.images, strict=True)):
            theirs = against.baseline.images[i]
            row: Row = {
                "method": shown.key,
                "index": picture.index,
                "seed": picture.seed,
                "prompt": picture.prompt,
                "split": picture.split,
                "baseline_distance": _number(to_baseline[i]),
                "reference_distance": _number(reference[i]),
                "psnr": None if is_baseline else fidelity.psnr(ours, theirs),
                "ssim": None if is_baseline else fidelity.ssim(ours, theirs),
                "high_frequency": grain(ours),
                "clip": _number(fits[i]),
            }
            rows.append(row | read[i])
        return rows

    def _distribution(self, shown: "Shown", against: "Against") -> Row:
        """Return distances to real pictures and to the baseline's other seeds, and their differences to the
        baseline's."""
        count, is_baseline = len(shown.images), shown is against.baseline
        row: Row = {"diversity": metrics.diversity(shown.features)}
        if self.real is not None:
            sample = metrics.FrechetSample(self._projected(shown.features), self._reference)
            if is_baseline:
                against.baseline_sample = sample
            everyone = np.arange(count)
            row["fd"] = sample.distance(everyone)
            if (other := against.baseline_sample) is not None and not is_baseline:
                error = metrics.frechet_difference_error(sample, other, count, self.settings.bootstrap)
                row["fd_change"] = row["fd"] - other.distance(everyone)
                row["fd_change_error"] = error
                row["pictures_for_2_percent"] = metrics.pictures_needed(row["fd"], error, count)
        if self.real is not None and count >= _FEWEST:
            ours = metrics.kernel_distance(shown.features, self._kernel_reference)
            self.kernels[shown.key] = ours
            row |= _kernel_row("kid", ours, None if is_baseline else self.kernels[against.baseline.key])
        if against.others is not None and count >= _FEWEST:
            ours = metrics.kernel_distance(shown.features, against.others)
            against.baseline_kernel = ours if is_baseline else against.baseline_kernel
            row |= _kernel_row("kid_seeds", ours, None if is_baseline else against.baseline_kernel)
        return row


@dataclass(frozen=True)
class Shown:
    """The pictures of one row: their name, and features (N, D)."""

    key: str
    images: Sequence[Image.Image]
    features: np.ndarray


@dataclass
class Against:
    """What rows are compared with, read once: the baseline's pictures, reference ones, and baseline's other
    seeds."""

    baseline: Shown
    looks: Looks
    reference: Looks | None
    others: metrics.KernelSet | None
    baseline_rows: list[Row] = field(default_factory=list)
    """Of each baseline picture, once the baseline's own row is made; it comes first."""
    baseline_sample: metrics.FrechetSample | None = None
    """Of the baseline's pictures, likewise."""
    baseline_kernel: metrics.KernelDistance | None = None
    """Of the baseline's pictures to those of its other seeds, likewise."""


def scene_reader(pictures: Sequence[Picture], device: torch.device) -> Any:
    """Return what reads scenes, or None where pictures were not asked for as scenes."""
    if not pictures or any(picture.triple is None for picture in pictures):
        return None
    from agentsd_demo.data import trained_concepts
    from agentsd_demo.reading import ConceptReader

    network = load_network("efficientnet-lite0", device)

    def features(images: Sequence[Image.Image]) -> torch.Tensor:
        return F.normalize(torch.from_numpy(network(images)))

    def known(images: Sequence[Image.Image]) -> torch.Tensor:
        return F.normalize(torch.from_numpy(features_of(network, images, user_cache() / "features")))

    return ConceptReader(trained_concepts(), features, known)


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def _kernel_row(name: str, ours: metrics.KernelDistance, baseline: metrics.KernelDistance | None) -> Row:
    """A KID as `name`, and its change against the baseline's."""
    row = {name: ours.value, f"{name}_error": ours.error}
    if baseline is not None:
        row[f"{name}_change"] = ours.value - baseline.value
        row[f"{name}_change_error"] = ours.difference_error(baseline)
    return row
