"""Read a picture of a scene: where its sprite is, what colour it stands on, and what concept it is.

`python -m agentsd_demo.reading` prints how well the bundled toy model does what its captions say.
"""

import colorsys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from PIL import Image
from rich import print
from torch import Tensor

from .accuracy import contact_sheet, efficientnet_lite0, generate
from .data import PIPELINE, Style, trained_concepts
from .memorised import nearest_similarities, training_scenes
from .pipeline_io import load_pipeline
from .scenes import COLOURS, SceneSplit, Triple, compose, triples

Features = Callable[[Sequence[Image.Image]], Tensor]
Box = tuple[int, int, int, int]
"""Left, top, right and bottom of the pixels that differ from the background."""

FAR = 28.0
"""What a pixel's furthest channel differs from the background by, of 255, to be the sprite's."""
_MARGIN = 2
_TRAINING = 2000
_SPLITS: tuple[SceneSplit, ...] = ("seen", "heldout triple", "heldout pair")


@dataclass(frozen=True)
class Reading:
    """What a picture shows: the background's colour, and the sprite's box or None where there is none."""

    colour: str
    box: Box | None


def read_scene(image: Image.Image) -> Reading:
    """Fit the background's plane, and find what differs from it."""
    pixels = np.asarray(image.convert("RGB"), float)
    background = fit_background(pixels)
    middle = background[background.shape[0] // 2, background.shape[1] // 2]
    differs = np.abs(pixels - background).max(-1) > FAR
    return Reading(nearest_colour(middle), _box(differs))


def fit_background(pixels: np.ndarray) -> np.ndarray:
    """The linear background of a picture (H, W, 3), fitted to its rim without what stands out there."""
    height, width, _ = pixels.shape
    y, x = np.mgrid[:height, :width]
    plane = np.stack([x / width, y / height, np.ones((height, width))], -1)
    rim = np.zeros((height, width), bool)
    for edge in (np.s_[:3], np.s_[-3:], np.s_[:, :3], np.s_[:, -3:]):
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
    if differs.sum() < 30:
        return None
    sides = []
    for axis in (0, 1):
        along = np.cumsum(differs.sum(axis)) / differs.sum()
        sides.append((int(np.searchsorted(along, 0.01)), int(np.searchsorted(along, 0.99)) + 1))
    (left, right), (top, bottom) = sides
    return left, top, right, bottom


def crop_sprite(image: Image.Image, box: Box | None) -> Image.Image:
    """A square around the box, the whole picture where there is none."""
    if box is None:
        return image
    left, top, right, bottom = box
    half = max(right - left, bottom - top) / 2 + _MARGIN
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
                compose(Triple(concept, style, colour), f"read/{view}", 96).image
                for concept, style in self._pairs
                for view in range(self._views)
            ]
            crops = [crop_sprite(image, read_scene(image).box) for image in scenes]
            self._known[colour] = self._features_of_known(crops)
        return self._known[colour]


def shares(asked: Sequence[Triple], images: Sequence[Image.Image], reader: ConceptReader) -> dict[str, Any]:
    """By split: how many pictures, and the shares with the right concept, style and colour."""
    hits: dict[str, list[tuple[bool, bool, bool]]] = {}
    for triple, image in zip(asked, images, strict=True):
        reading = read_scene(image)
        concept, style = reader.read(image, reading)
        right = concept == triple.concept, style == triple.style, reading.colour == triple.colour
        hits.setdefault(triple.split, []).append(right)
    table = {}
    for split, rows in hits.items():
        means = np.mean(rows, 0)
        table[split] = {"pictures": len(rows), "concept": means[0], "style": means[1], "colour": means[2]}
    return table


def spread(images: Sequence[Image.Image]) -> float:
    """Standard deviation in pixels of the sprite's centre, the mean of both axes."""
    boxes = [box for image in images if (box := read_scene(image).box) is not None]
    centres = np.asarray([((left + right) / 2, (top + bottom) / 2) for left, top, right, bottom in boxes])
    return float(centres.std(0).mean()) if len(boxes) > 1 else 0.0


def main(
    folder: Annotated[Path, typer.Option(help="an exported pipeline")] = PIPELINE,
    size: Annotated[int, typer.Option(help="canvas, pixels")] = 96,
    steps: Annotated[int, typer.Option(help="DPM++ 2M (Karras) steps")] = 25,
    guidance: Annotated[float, typer.Option(help="guidance scale")] = 4.0,
    most: Annotated[int, typer.Option(help="triples of a split at most")] = 72,
    sheet: Annotated[Path | None, typer.Option(help="where a contact sheet goes")] = None,
) -> None:
    """Print the shares of right concepts, styles and colours, and how far one caption's sprites spread."""
    from diffusers import DPMSolverMultistepScheduler

    pipe: Any = load_pipeline(folder=folder)
    config = pipe.scheduler.config
    pipe.scheduler = DPMSolverMultistepScheduler.from_config(config, use_karras_sigmas=True)
    concepts = trained_concepts(folder)
    features = efficientnet_lite0()
    reader = ConceptReader(concepts, features)
    asked = []
    for split in _SPLITS:
        every = triples(split, concepts)
        asked += every[:: max(1, len(every) // most)][:most]
    options = {"steps": steps, "guidance": guidance, "size": size}
    images = generate(pipe, [triple.caption for triple in asked], **options)  # type: ignore[arg-type]
    composed = [compose(triple, f"fresh/{i}", size).image for i, triple in enumerate(asked)]
    for name, pictures in (("composed", composed), ("generated", images)):
        for kind, row in shares(asked, pictures, reader).items():
            rights = ", ".join(f"{part} {row[part]:.0%}" for part in ("concept", "style", "colour"))
            print(f"{name}, {kind}, {row['pictures']} pictures: {rights}")
    if scenes := training_scenes(folder, size, _TRAINING):
        known = features(scenes)
        for name, pictures in (("composed", composed), ("generated", images)):
            near = np.quantile(nearest_similarities(features(pictures), known), (0.5, 0.95))
            text = f"median {near[0]:.3f}, 95% below {near[1]:.3f}"
            print(f"{name}, cosine to the nearest of {len(scenes)} training scenes: {text}")
    first = asked[0]
    same = generate(pipe, [first.caption] * 16, seed=10_000, **options)  # type: ignore[arg-type]
    truth = [compose(first, f"spread/{i}", size).image for i in range(200)]
    print(f"spread of {first.caption!r}: {spread(same):.1f} px, composed {spread(truth):.1f} px")
    if sheet is not None:
        contact_sheet(images[:48] + same).save(sheet)


if __name__ == "__main__":
    typer.run(main)
