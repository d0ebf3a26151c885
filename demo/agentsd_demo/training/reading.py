"""How well the toy model does what its captions say: `python -m agentsd_demo.training.reading`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from PIL import Image
from rich import print

from ..data import PIPELINE, SIZE, trained_concepts
from ..pipeline_io import load_pipeline
from ..reading import ConceptReader, count_things, read_scene
from ..scenes import SceneSplit, Triple, compose, triples
from .accuracy import efficientnet_lite0, generate, image_grid
from .memorised import nearest_similarities, training_scenes

PARTS = ("concept", "style", "colour", "alone")
_SPLITS: tuple[SceneSplit, ...] = ("seen", "heldout triple", "heldout pair")


def shares(asked: Sequence[Triple], images: Sequence[Image.Image], reader: ConceptReader) -> dict[str, Any]:
    """By split: images, and the shares with the right concept, style, colour, and no second thing."""
    hits: dict[str, list[tuple[bool, ...]]] = {}
    for triple, image in zip(asked, images, strict=True):
        reading = read_scene(image)
        concept, style = reader.read(image, reading)
        right = concept == triple.concept, style == triple.style, reading.colour == triple.colour
        hits.setdefault(triple.split, []).append((*right, count_things(image) < 2))
    return {
        split: {"images": len(rows)} | dict(zip(PARTS, np.mean(rows, 0), strict=True))
        for split, rows in hits.items()
    }


def spread(images: Sequence[Image.Image]) -> float:
    """Standard deviation in pixels of the sprite's centre, the mean of both axes."""
    boxes = [box for image in images if (box := read_scene(image).box) is not None]
    centres = np.asarray([((left + right) / 2, (top + bottom) / 2) for left, top, right, bottom in boxes])
    return float(centres.std(0).mean()) if len(boxes) > 1 else 0.0


def main(
    folder: Annotated[Path, typer.Option(help="an exported pipeline")] = PIPELINE,
    size: Annotated[int, typer.Option(help="canvas, pixels")] = SIZE,
    steps: Annotated[int, typer.Option(help="DPM++ 2M (Karras) steps")] = 25,
    guidance: Annotated[float, typer.Option(help="guidance scale")] = 4.0,
    most: Annotated[int, typer.Option(help="triples of a split at most")] = 72,
    scenes: Annotated[int, typer.Option(help="of the training that images are compared with")] = 2000,
    same: Annotated[int, typer.Option(help="images of one caption, for the spread of their sprites")] = 16,
    grid: Annotated[Path | None, typer.Option(help="where a grid of images goes")] = None,
) -> None:
    """Print the shares of images that are right, and how far one caption's sprites spread."""
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
    for name, made in (("composed", composed), ("generated", images)):
        for kind, row in shares(asked, made, reader).items():
            rights = ", ".join(f"{part} {row[part]:.0%}" for part in PARTS)
            print(f"{name}, {kind}, {row['images']} images: {rights}")
    if trained := training_scenes(folder, size, scenes):
        known = features(trained)
        for name, made in (("composed", composed), ("generated", images)):
            near = np.quantile(nearest_similarities(features(made), known), (0.5, 0.95))
            text = f"median {near[0]:.3f}, 95% below {near[1]:.3f}"
            print(f"{name}, cosine to the nearest of {len(trained)} training scenes: {text}")
    first = asked[0]
    alike = generate(pipe, [first.caption] * same, seed=10_000, **options)  # type: ignore[arg-type]
    if same:
        truth = [compose(first, f"spread/{i}", size).image for i in range(200)]
        print(f"spread of {first.caption!r}: {spread(alike):.1f} px, composed {spread(truth):.1f} px")
    if grid is not None:
        image_grid(images[:48] + alike).save(grid)


if __name__ == "__main__":
    typer.run(main)
