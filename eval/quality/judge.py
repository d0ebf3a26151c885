"""The quality figures of a row: distance to real pictures, prompt accuracy, fidelity to stock."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from ..pictures.methods import Method
from ..pictures.prompts import Picture
from ..pictures.store import Store
from ..settings import RunSettings
from . import fidelity, metrics
from .clip import ClipScore
from .feature_file import SUFFIX, save_features
from .features import Network, features_of, load_network, picture_files

_SPLITS = 5
_FEWEST = 3  # pictures that a kernel distance without one of them needs
Row = dict[str, Any]


@dataclass(frozen=True)
class Real:
    """Real pictures, and for the embedded model the concept that each shows."""

    pictures: Sequence[Image.Image] | Sequence[Path]
    concepts: Sequence[str] = ()
    crop: tuple[int, int] | None = None


def load_real(settings: RunSettings, height: int, width: int) -> Real | None:
    """Return the pictures to measure distances to, or None: another model without --reference has none.

    Photographs of a folder are brought to the size of the generated ones (the paper doesn't say what it
    does): scaled to cover it, then cut from the centre.
    """
    if settings.reference:
        return Real(picture_files(settings.reference), crop=(height, width))
    if settings.model == "demo":
        from agentsd.demo import load_references

        references = load_references()
        return Real([r.image for r in references], [r.concept for r in references])
    return None


@dataclass
class Judge:
    """Figures of every method of a run against the same real pictures and the same stock pictures."""

    settings: RunSettings
    pictures: Sequence[Picture]
    real: Real | None
    device: torch.device
    network: Network = field(init=False)
    real_features: np.ndarray = field(init=False)
    """Features (M, D) of the real pictures, once they are read."""

    def __post_init__(self) -> None:
        self.network = load_network(self.settings.features, self.device, self.settings.inception_weights)
        self._clip = ClipScore(self.settings.clip, self.device) if self.settings.clip else None
        self._cache = self.settings.out / "features"

    def read_real(self, tick: Callable[[int], Any]) -> None:
        """Read the real pictures, before any picture is made: one that can't be read ends the run early."""
        if self.real is not None:
            self.real_features = features_of(
                self.network, self.real.pictures, self._cache, self.real.crop, tick
            )
            self._reference = metrics.fit(self.real_features)

    def _some_real(self, count: int) -> np.ndarray:
        """Return features of `count` real pictures (all, if there are fewer), always the same ones."""
        order = np.random.default_rng(0).permutation(len(self.real_features))
        return self.real_features[order[:count]]

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
            order = random.permutation(len(self.real_features))
            some, rest = self.real_features[order[:count]], self.real_features[order[count:]]
            frechet.append(metrics.FrechetSample(some, metrics.fit(rest)).distance(np.arange(count)))
            kernel.append(metrics.kernel_distance(some, rest[:count]).value)
        return {
            "method": "real/real",
            "ratio": None,
            "backend": None,
            "images": count,
            "frechet": float(np.mean(frechet)),
            "kernel": float(np.mean(kernel)),
            "kernel_error": float(np.std(kernel, ddof=1)),
        }

    def judge(
        self, store: Store, methods: Sequence[Method], tick: Callable[[int], Any]
    ) -> tuple[list[Row], list[Row]]:
        """Return a row for each method (the first is stock) and a row for each method and picture.

        The features of stock and of the default are written to `features/<method>.npz` in the run's folder,
        those of the real pictures to `features/real.npz`: what is small enough to be kept with a table.
        """
        paths = {m: [store.path(m, picture.index) for picture in self.pictures] for m in methods}
        features = {m: features_of(self.network, paths[m], self._cache, tick=tick) for m in methods}
        kept = {m.key: features[m] for m in methods if m.is_stock or m.is_default}
        if self.real is not None:
            kept["real"] = self.real_features
        for name, vectors in kept.items():
            save_features(self._cache / f"{name}{SUFFIX}", self.network.name, vectors)
        single = {m: self._each(m, store, methods[0], features) for m in methods}
        rows = [
            self._distribution(m, methods[0], features)
            | _mean_of(single[m], single[methods[0]])
            | {"images": len(self.pictures)}
            for m in methods
        ]
        return rows, [row for m in methods for row in single[m]]

    def _each(
        self, method: Method, store: Store, stock: Method, features: dict[Method, np.ndarray]
    ) -> list[Row]:
        """Return the figures of each picture alone."""
        moved = metrics.cosine_distance(features[method], features[stock])
        shown: list[str | None] = [None] * len(self.pictures)
        if self.real is not None and self.real.concepts:
            nearest = metrics.nearest(features[method], self.real_features)
            shown = [self.real.concepts[index] for index in nearest]
        images = [store.image(method, picture.index) for picture in self.pictures]
        fits: Sequence[float | None] = [None] * len(images)
        if self._clip is not None:
            fits = self._clip(images, [picture.prompt for picture in self.pictures]).tolist()
        rows = []
        for number, (picture, ours) in enumerate(zip(self.pictures, images, strict=True)):
            theirs = store.image(stock, picture.index)
            rows.append(
                {
                    "method": method.key,
                    "index": picture.index,
                    "seed": picture.seed,
                    "prompt": picture.prompt,
                    "split": picture.split,
                    "psnr": fidelity.psnr(ours, theirs) if method != stock else None,
                    "ssim": fidelity.ssim(ours, theirs) if method != stock else None,
                    "feature_distance": float(moved[number]) if method != stock else None,
                    "clip": fits[number],
                    "shows": shown[number],
                    "right": None if shown[number] is None else shown[number] == picture.concept,
                }
            )
        return rows

    def _distribution(self, method: Method, stock: Method, features: dict[Method, np.ndarray]) -> Row:
        """Return distances to the real pictures, and their paired differences to stock's."""
        if self.real is None:
            return {}
        count = len(self.pictures)
        ours, theirs = (metrics.FrechetSample(features[m], self._reference) for m in (method, stock))
        everyone = np.arange(count)
        row: Row = {"frechet": ours.distance(everyone)}
        if method != stock:
            error = metrics.frechet_difference_error(ours, theirs, count, self.settings.bootstrap)
            row["frechet_change"] = row["frechet"] - theirs.distance(everyone)
            row["frechet_change_error"] = error
            row["pictures_for_2_percent"] = metrics.pictures_needed(row["frechet"], error, count)
        some = self._some_real(count)
        if min(count, len(some)) < _FEWEST:
            return row
        kernel, stock_kernel = (metrics.kernel_distance(features[m], some) for m in (method, stock))
        row |= {"kernel": kernel.value, "kernel_error": kernel.error}
        if method != stock:
            row["kernel_change"] = kernel.value - stock_kernel.value
            row["kernel_change_error"] = kernel.difference_error(stock_kernel)
        return row


def _mean_of(rows: list[Row], stock: list[Row]) -> Row:
    """Return means over the pictures with standard errors, and changes against stock's same seeds."""
    means: Row = {}
    for key in ("psnr", "ssim", "feature_distance"):
        values = np.array([row[key] for row in rows if row[key] is not None])
        if len(values):
            means[key] = float(values.mean())
            means[f"{key}_error"] = metrics.standard_error(values) if np.isfinite(values).all() else 0.0
    for key, split in (("clip", None), ("right", "seen"), ("right", "heldout")):
        name = key if split is None else f"{key}_{split}"
        pairs = [
            (ours[key], theirs[key])
            for ours, theirs in zip(rows, stock, strict=True)
            if split in (None, ours["split"]) and ours[key] is not None
        ]
        if not pairs:
            continue
        values = np.array(pairs, dtype=np.float64)
        means[name] = float(values[:, 0].mean())
        means[f"{name}_count"] = len(pairs)
        if rows is not stock:
            change = values[:, 0] - values[:, 1]
            means[f"{name}_change"] = float(change.mean())
            if len(pairs) > 1:
                means[f"{name}_change_error"] = metrics.standard_error(change)
    return means
