"""What the images of a finetuned subject are scored by, and a row of figures for each variant."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image

from ..images.prompts import ImageSpec
from ..images.store import Store, times_of
from ..intervals import standard_error
from ..pages.rows import Row
from ..quality.encoders import ClipScore, Dino
from ..quality.features import load_network
from ..quality.metrics import unit
from .settings import SubjectSettings
from .subject_plan import Variant, baseline_of

Images = Sequence[Image.Image]


@dataclass(frozen=True)
class Score:
    """A score of images: the subject's by `features`, beside its views; or other prompts' by `fit`."""

    name: str
    about: str
    features: Callable[[Images], np.ndarray] | None = None
    fit: Callable[[Images, Sequence[ImageSpec]], np.ndarray] | None = None


def load_scores(settings: SubjectSettings, device: torch.device) -> list[Score]:
    """Return the scores that the settings' models allow; raises EvalError if one can't be loaded."""
    scores = []
    if settings.model == "demo":
        about = "mean cosine of EfficientNet-Lite0 features to the subject's views"
        scores.append(Score("similarity", about, load_network("efficientnet-lite0", device)))
        about = "the nearest reference is of the prompted concept"
        scores.append(Score("right", about, fit=_reader_of_concepts(device)))
    if settings.clip:
        clip = ClipScore(settings.clip, device)
        about = "mean cosine of CLIP's image embeddings to those of the subject's views"
        scores.append(Score("clip_i", about, clip.embed))
        about = "cosine of CLIP's embeddings of other prompts and their images"
        scores.append(Score("clip_t", about, fit=lambda i, p: clip(i, [one.prompt for one in p]) / 100))
    if settings.dino:
        about = "mean cosine of DINO's class tokens to those of the subject's views"
        scores.append(Score("dino", about, Dino(settings.dino, device)))
    return sorted(scores, key=lambda score: score.fit is not None)  # those of the subject first


def _reader_of_concepts(device: torch.device) -> Callable[[Images, Sequence[ImageSpec]], np.ndarray]:
    from ..quality.scenes import read_scenes, scene_reader

    reader = scene_reader(device)

    def right(images: Images, specs: Sequence[ImageSpec]) -> np.ndarray:
        asked = [spec.triple for spec in specs if spec.triple is not None]
        return np.array(read_scenes(images, asked, reader), dtype=float)

    return right


def similarity(features: np.ndarray, views: np.ndarray) -> np.ndarray:
    """Return for each of features (N, D) its mean cosine to the views' features (V, D), (N,)."""
    return (unit(features) @ unit(views).T).mean(axis=1)


def similarity_among(views: np.ndarray) -> float:
    """Return the mean cosine of two different rows of features (V, D), V at least 2."""
    rows = unit(views)
    count = len(rows)
    return float(((rows @ rows.T).sum() - count) / (count * (count - 1)))


def rows_of(
    figures: Mapping[Variant, Mapping[str, np.ndarray]],
    store: Store,
    settings: SubjectSettings,
    device: torch.device,
) -> list[Row]:
    """Return a row for each variant from its scores, one for each image in the order of the seeds.

    It has means, standard errors, changes against `baseline_of` it paired by seed, and seconds beside those
    of the first row, whose weights cost the same.
    """
    rows: list[Row] = []
    times = times_of([store.timings(variant) for variant in figures], device)
    for (variant, scores), taken in zip(figures.items(), times, strict=True):
        baseline = baseline_of(variant, [*figures])
        row: Row = {
            "variant": variant.where,
            "prior": variant.prior,
            "images": settings.images,
            "other_images": settings.other_prompts,
        }
        for name, values in scores.items():
            row |= {name: float(values.mean()), f"{name}_error": standard_error(values)}
            if variant != baseline:
                change = values - figures[baseline][name]
                row[f"{name}_change"] = float(change.mean())
                row[f"{name}_change_error"] = standard_error(change)
        rows.append(row | taken | store.makers(variant))
    return rows
