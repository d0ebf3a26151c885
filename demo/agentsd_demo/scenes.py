"""Scenes: one sprite at a random place and size on a coloured background, made from a seed without end.

A scene is a pure function of its seed, its size and what is asked for, so that training images and fresh
references are told apart by their seeds alone.

The sprite keeps its proportion on a canvas of any size, so that a prompt means the same picture at each. The
U-Net sees by the canvas at what scale to draw: its convolutions' padding marks the borders, and its global
self-attention carries them inwards. So a prompt needs no word for the size, and the model no input that SD
1.5 hasn't.
"""

import colorsys
import hashlib
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Literal

import numpy as np
from PIL import Image

from .data import SIZE, Reference, Style, caption_of, load_references, trained_concepts

SceneSplit = Literal["seen", "heldout triple", "heldout pair"]

COLOURS: dict[str, tuple[float, tuple[float, float], tuple[float, float]]] = {
    "white": (0.0, (0.0, 0.03), (0.93, 1.0)),
    "black": (0.0, (0.0, 0.2), (0.04, 0.16)),
    "red": (0.0, (0.75, 0.95), (0.7, 0.95)),
    "orange": (0.083, (0.8, 1.0), (0.9, 1.0)),
    "yellow": (0.15, (0.65, 0.9), (0.9, 1.0)),
    "green": (0.34, (0.5, 0.8), (0.5, 0.8)),
    "blue": (0.6, (0.6, 0.9), (0.65, 0.95)),
    "purple": (0.77, (0.5, 0.75), (0.5, 0.8)),
    "pink": (0.92, (0.25, 0.45), (0.93, 1.0)),
}
"""Background colours: a hue, and ranges of saturation and value that keep them apart."""
SIZES = (128, 192, 256)
"""The canvases that the model is trained on, pixels on a side."""
SIDES = (11 / 16, 15 / 16)
"""The smallest and the largest sprite's side, of the canvas': 88 to 120 of 128 px, 176 to 240 of 256."""
_HUE_SPREAD = 0.012
_HELDOUT_TRIPLES = 0.25  # of few concepts, so that an accuracy rests on 70 and more
_SPLIT_SEED = "agentsd-scenes-0"


@dataclass(frozen=True)
class Triple:
    """What a scene shows: a concept in a style on a colour."""

    concept: str
    style: Style
    colour: str

    @property
    def caption(self) -> str:
        """The prompt that asks for it, such as "a 3d emoji of a fox face on blue"."""
        return scene_caption(self.concept, self.style, self.colour)

    @property
    def split(self) -> SceneSplit:
        """Whether the model is trained on it, and if not, on its concept in its style elsewhere."""
        if _sprites()[self.concept, self.style].split == "heldout":
            return "heldout pair"
        text = f"{_SPLIT_SEED}/{self.concept}/{self.style}/{self.colour}"
        share = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4]) / 2**32
        return "heldout triple" if share < _HELDOUT_TRIPLES else "seen"


@dataclass(frozen=True)
class Scene:
    """An image (RGB), what it shows, and the sprite's box: left, top and side in pixels."""

    triple: Triple
    box: tuple[int, int, int]
    image: Image.Image = field(repr=False, compare=False)


def scene_caption(concept: str, style: str | None, colour: str | None) -> str:
    """Return the prompt for a concept, in any style where that is None, and on any background."""
    return caption_of(concept, style) + (f" on {colour}" if colour else "")


def triples(
    split: SceneSplit | None = None, concepts: Sequence[str] | Literal["all"] | None = None
) -> list[Triple]:
    """Return what scenes can show, in a fixed order: of one split, or of all.

    `concepts` is what `load_references` takes; the trained ones by default.
    """
    references = load_references(concepts=concepts if concepts is not None else trained_concepts())
    every = [Triple(r.concept, r.style, colour) for r in references for colour in COLOURS]
    return [triple for triple in every if split is None or triple.split == split]


def compose(triple: Triple, seed: int | str, size: int = SIZE) -> Scene:
    """Return the scene of a seed on a canvas of `size` pixels.

    The sprite's side is uniform between `SIDES`, and its place on the canvas is uniform. The background runs
    linearly, in a random direction, between two shades of the colour.
    """
    # A string seeds by its hash, and random() alone is promised to stay the same in later versions.
    draw = random.Random(f"{seed}/{size}").random
    smallest, largest = (round(share * size) for share in SIDES)
    side = smallest + int(draw() * (largest - smallest + 1))
    left, top = (int(draw() * (size - side + 1)) for _ in range(2))
    first, last = (_shade(triple.colour, draw) for _ in range(2))
    canvas = _gradient(first, last, 2 * math.pi * draw(), size)
    sprite = _sprites()[triple.concept, triple.style].sprite
    sprite = sprite.resize((side, side), Image.Resampling.LANCZOS)
    canvas.paste(sprite, (left, top), sprite)
    return Scene(triple, (left, top, side), canvas)


def random_scene(seed: int | str, size: int = SIZE, *, among: Sequence[Triple]) -> Scene:
    """Return a scene whose triple is drawn by the seed as well."""
    triple = among[int(random.Random(f"{seed}/triple").random() * len(among))]
    return compose(triple, seed, size)


@cache
def _sprites() -> dict[tuple[str, str], Reference]:
    return {(r.concept, r.style): r for r in load_references(concepts="all")}


def _shade(colour: str, draw: Callable[[], float]) -> np.ndarray:
    hue, saturation, value = COLOURS[colour]
    hue += (2 * draw() - 1) * _HUE_SPREAD
    parts = [low + draw() * (high - low) for low, high in (saturation, value)]
    return 255 * np.asarray(colorsys.hsv_to_rgb(hue % 1, *parts))


def _gradient(first: np.ndarray, last: np.ndarray, angle: float, size: int) -> Image.Image:
    along = (np.arange(size) + 0.5) / size - 0.5
    across = math.cos(angle) * along[None, :] + math.sin(angle) * along[:, None]
    share = (across / (abs(math.cos(angle)) + abs(math.sin(angle))) + 0.5)[..., None]
    pixels = (1 - share) * first + share * last
    return Image.fromarray(pixels.round().astype(np.uint8))
