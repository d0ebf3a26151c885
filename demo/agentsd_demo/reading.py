"""Read an image of a scene: where its sprite is, what colour it stands on, and what concept it is."""

import colorsys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d, max_pool2d

from .data import Style
from .scenes import COLOURS, Triple, compose, triples

Features = Callable[[Sequence[Image.Image]], Tensor]
Box = tuple[int, int, int, int]
"""Left, top, right and bottom of the pixels that differ from the background."""

FAR = 28.0
"""What a pixel's furthest channel differs from the background by, of 255, to be the sprite's."""
_MARGIN, _RIM = 1 / 32, 3 / 64
"""Of the canvas' side: what is left around a sprite, and how wide the rim is that shows the background."""
_THING = 0.015
"""Of the canvas' pixels: what is smaller is a sprite's ornament, such as a rocket's stars."""
_LEAST = 0.007
"""Of the canvas' pixels: fewer than these are no sprite."""


@dataclass(frozen=True)
class Reading:
    """What an image shows: the background's colour, and the sprite's box or None where there is none."""

    colour: str
    box: Box | None


def read_scene(image: Image.Image) -> Reading:
    """Fit the background's plane, and find what differs from it."""
    pixels = np.asarray(image.convert("RGB"), float)
    background = fit_background(pixels)
    middle = background[background.shape[0] // 2, background.shape[1] // 2]
    differs = np.abs(pixels - background).max(-1) > FAR
    return Reading(nearest_colour(middle), _box(differs))


def count_things(image: Image.Image) -> int:
    """Count what stands apart on the background: regions of `_THING` of the canvas and more.

    Gaps of up to a 32nd of the canvas' side part no thing, as a sprite may hold the background's colour.
    """
    pixels = np.asarray(image.convert("RGB"), float)
    differs = np.abs(pixels - fit_background(pixels)).max(-1) > FAR
    cells = adaptive_avg_pool2d(torch.from_numpy(differs).float()[None], 64) > 0.5
    joined = max_pool2d(cells.float(), 3, 1, 1)
    numbers = joined * torch.arange(1.0, 64 * 64 + 1).view(1, 64, 64)
    while not torch.equal(spread := max_pool2d(numbers, 3, 1, 1) * joined, numbers):
        numbers = spread
    sizes = numbers[cells].unique(return_counts=True)[1]
    return int((sizes >= _THING * 64 * 64).sum())


def fit_background(pixels: np.ndarray) -> np.ndarray:
    """The linear background of an image (H, W, 3), fitted to its rim without what stands out there."""
    height, width, _ = pixels.shape
    y, x = np.mgrid[:height, :width]
    plane = np.stack([x / width, y / height, np.ones((height, width))], -1)
    rim = np.zeros((height, width), bool)
    wide = round(_RIM * min(height, width))
    for edge in (np.s_[:wide], np.s_[-wide:], np.s_[:, :wide], np.s_[:, -wide:]):
        rim[edge] = True
    points, values = plane[rim], pixels[rim]
    kept = np.abs(values - np.median(values, 0)).max(-1) < 90
    for bound in (60, 40, FAR, FAR):
        if kept.sum() < 16:
            kept[:] = True
        fit = np.linalg.lstsq(points[kept], values[kept], rcond=None)[0]
        kept = np.abs(points @ fit - values).max(-1) < bound
    return plane @ fit


def nearest_colour(rgb: np.ndarray) -> str:
    """The name of a background colour, by the nearest middle of the ranges that scenes draw from."""
    return min(COLOURS, key=lambda name: np.abs(_middle(name) - rgb).sum())


@cache
def _middle(name: str) -> np.ndarray:
    hue, saturation, value = COLOURS[name]
    return 255 * np.asarray(colorsys.hsv_to_rgb(hue, sum(saturation) / 2, sum(value) / 2))


def _box(differs: np.ndarray) -> Box | None:
    """The rows and columns that hold all but the last percent of the pixels, on either side."""
    if differs.mean() < _LEAST:
        return None
    sides = []
    for axis in (0, 1):
        along = np.cumsum(differs.sum(axis)) / differs.sum()
        sides.append((int(np.searchsorted(along, 0.01)), int(np.searchsorted(along, 0.99)) + 1))
    (left, right), (top, bottom) = sides
    return left, top, right, bottom


def crop_sprite(image: Image.Image, box: Box | None) -> Image.Image:
    """A square around the box, the whole image where there is none."""
    if box is None:
        return image
    left, top, right, bottom = box
    half = max(right - left, bottom - top) / 2 + _MARGIN * min(image.size)
    x, y = (left + right) / 2, (top + bottom) / 2
    return image.crop((round(x - half), round(y - half), round(x + half), round(y + half)))


class ConceptReader:
    """Names the concept and style of a sprite by the nearest of composed scenes on the same colour.

    `known` gives the features of those scenes, where they are kept from run to run.
    """

    def __init__(
        self, concepts: Sequence[str], features: Features, known: Features | None = None, views: int = 3
    ) -> None:
        self._features, self._features_of_known = features, known or features
        self._views = views
        self._pairs = sorted({(t.concept, t.style) for t in triples(concepts=concepts)})
        self._known: dict[str, Tensor] = {}

    def read(self, image: Image.Image, reading: Reading) -> tuple[str, Style]:
        """The nearest concept and style."""
        known = self._of(reading.colour)
        found = self._features([crop_sprite(image, reading.box)])
        place = int((known @ found[0]).argmax()) // self._views
        return self._pairs[place]

    def _of(self, colour: str) -> Tensor:
        if colour not in self._known:
            scenes = [
                compose(Triple(concept, style, colour), f"read/{view}").image
                for concept, style in self._pairs
                for view in range(self._views)
            ]
            crops = [crop_sprite(image, read_scene(image).box) for image in scenes]
            self._known[colour] = self._features_of_known(crops)
        return self._known[colour]
