"""What the images of a finetuned subject are scored by: the field's scores, or those of the toy model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image

from ..images.prompts import ImageSpec
from ..pages.subject_table import FIT, LIKENESS
from ..quality.encoders import ClipScore, Dino
from ..quality.features import load_network
from ..quality.metrics import unit
from ..table_settings import SubjectSettings

Images = Sequence[Image.Image]


@dataclass(frozen=True)
class Likeness:
    """A score of the subject's images: their mean cosine to the views' features."""

    name: str
    about: str
    features: Callable[[Images], np.ndarray]

    @property
    def title(self) -> str:
        """What it is called."""
        return LIKENESS[self.name]

    def __call__(self, images: Images, views: Images) -> np.ndarray:
        """Return the score of each image, (N,)."""
        return similarity(self.features(images), self.features(views))

    def ceiling(self, views: Images) -> float:
        """Return the mean score of two views."""
        return similarity_among(self.features(views))


@dataclass(frozen=True)
class Fit:
    """A score of other prompts' images: whether they show what was asked for."""

    name: str
    about: str
    score: Callable[[Images, Sequence[ImageSpec]], np.ndarray]

    @property
    def title(self) -> str:
        """What it is called."""
        return FIT[self.name]


@dataclass(frozen=True)
class Scores:
    """What a run is scored by; both may be empty."""

    likeness: Sequence[Likeness] = ()
    fit: Sequence[Fit] = ()

    @property
    def every(self) -> list[Likeness | Fit]:
        """All of them, those of the subject first."""
        return [*self.likeness, *self.fit]


def load_scores(settings: SubjectSettings, device: torch.device) -> Scores:
    """Return the scores that the settings' models allow; raises EvalError if one can't be loaded."""
    likeness, fit = [], []
    if settings.model == "demo":
        network = load_network("efficientnet-lite0", device)
        about = "mean cosine of EfficientNet-Lite0 features to the subject's views"
        likeness.append(Likeness("similarity", about, network))
        fit.append(_right(device))
    if settings.clip:
        clip = ClipScore(settings.clip, device)
        about = "mean cosine of CLIP's image embeddings to those of the subject's views"
        likeness.append(Likeness("clip_i", about, clip.embed))
        about = "cosine of CLIP's embeddings of other prompts and their images"
        fit.append(Fit("clip_t", about, lambda i, p: clip(i, [one.prompt for one in p]) / 100))
    if settings.dino:
        about = "mean cosine of DINO's class tokens to those of the subject's views"
        likeness.append(Likeness("dino", about, Dino(settings.dino, device)))
    return Scores(likeness, fit)


def _right(device: torch.device) -> Fit:
    from ..quality.scenes import read_scenes, scene_reader

    reader = scene_reader(device)

    def score(images: Images, specs: Sequence[ImageSpec]) -> np.ndarray:
        asked = [spec.triple for spec in specs if spec.triple is not None]
        return np.array([row["right"] for row in read_scenes(images, asked, reader)], dtype=float)

    return Fit("right", "the nearest reference is of the prompted concept", score)


def similarity(features: np.ndarray, views: np.ndarray) -> np.ndarray:
    """Return for each of features (N, D) its mean cosine to the views' features (V, D), (N,)."""
    return (unit(features) @ unit(views).T).mean(axis=1)


def similarity_among(views: np.ndarray) -> float:
    """Return the mean cosine of two different rows of features (V, D), V at least 2."""
    rows = unit(views)
    count = len(rows)
    return float(((rows @ rows.T).sum() - count) / (count * (count - 1)))
