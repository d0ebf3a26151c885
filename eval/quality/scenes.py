"""What a picture of a scene shows beside what it was asked for: concept, style, colour, place and size."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from agentsd_demo.reading import Box, ConceptReader, read_scene
from agentsd_demo.scenes import Scene, Triple, random_scene, triples
from PIL import Image

FRESH = 4096
"""Scenes that pictures are compared with."""


def fresh_scenes(concepts: Sequence[str], size: int, count: int = FRESH) -> list[Scene]:
    """Return scenes of these concepts that nothing was trained on, always the same ones."""
    among = triples(concepts=concepts)
    return [random_scene(f"reference/{i}", size, among=among) for i in range(count)]


def read_pictures(
    images: Sequence[Image.Image], asked: Sequence[Triple], reader: ConceptReader
) -> list[dict[str, Any]]:
    """Return for each picture whether concept, style and colour are right, and its sprite's middle and side.

    Middle and side are in pixels; they are None where the picture is all background.
    """
    rows = []
    for image, triple in zip(images, asked, strict=True):
        reading = read_scene(image)
        concept, style = reader.read(image, reading)
        x, y, side = (None, None, None) if reading.box is None else _measures(reading.box)
        rows.append(
            {
                "right": reading.box is not None and concept == triple.concept,
                "right_style": reading.box is not None and style == triple.style,
                "right_colour": reading.colour == triple.colour,
                "x": x,
                "y": y,
                "side": side,
            }
        )
    return rows


def _measures(box: Box) -> tuple[float, float, float]:
    left, top, right, bottom = box
    return (left + right) / 2, (top + bottom) / 2, float(max(right - left, bottom - top))


def measures_of(images: Sequence[Image.Image]) -> np.ndarray:
    """Return the middle (x, y) and the side of each picture's sprite, (N, 3); empty pictures are left out."""
    boxes = [read_scene(image).box for image in images]
    return np.array([_measures(box) for box in boxes if box is not None]).reshape(-1, 3)


def place_distance(ours: np.ndarray, fresh: np.ndarray) -> tuple[float, float]:
    """Return how far sprites' places and sizes are distributed from fresh scenes' in pixels.

    Args:
        ours, fresh: middles and sides, (N, 3) and (M, 3).

    Returns:
        1-Wasserstein distances: of x and y, their mean, and of the side.
    """
    x, y, side = (wasserstein(ours[:, i], fresh[:, i]) for i in range(3))
    return (x + y) / 2, side


def wasserstein(a: np.ndarray, b: np.ndarray) -> float:
    """Return the 1-Wasserstein distance of samples (N,) and (M,): the area between their quantiles."""
    shares = np.unique(np.concatenate([np.arange(1, len(s) + 1) / len(s) for s in (a, b)]))
    widths = np.diff(shares, prepend=0.0)
    values = [np.sort(s)[np.ceil(shares * len(s) - 1e-9).astype(int) - 1] for s in (a, b)]
    return float((widths * np.abs(values[0] - values[1])).sum())
