"""What an image of a scene shows beside what its prompt asks for, for the bundled toy model."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from agentsd_demo.data import trained_concepts
from agentsd_demo.reading import ConceptReader, read_scene
from agentsd_demo.scenes import Scene, Triple, random_scene, triples
from PIL import Image

from .features import features_of, load_network, user_cache


def fresh_scenes(concepts: Sequence[str], size: int, count: int) -> list[Scene]:
    """Return scenes of these concepts that nothing was trained on, always the same ones."""
    among = triples(concepts=concepts)
    return [random_scene(f"reference/{i}", size, among=among) for i in range(count)]


def scene_reader(device: torch.device) -> ConceptReader:
    """Return what reads the concept and style of an image."""
    network = load_network("efficientnet-lite0", device)

    def features(images: Sequence[Image.Image]) -> torch.Tensor:
        return F.normalize(torch.from_numpy(network(images)))

    def known(images: Sequence[Image.Image]) -> torch.Tensor:
        return F.normalize(torch.tensor(features_of(network, images, user_cache() / "features")))

    return ConceptReader(trained_concepts(), features, known)


def read_scenes(
    images: Sequence[Image.Image], asked: Sequence[Triple], reader: ConceptReader
) -> list[dict[str, Any]]:
    """Return for each image whether its concept and colour are right."""
    rows = []
    for image, triple in zip(images, asked, strict=True):
        reading = read_scene(image)
        concept, _ = reader.read(image, reading)
        rows.append(
            {
                "right": reading.box is not None and concept == triple.concept,
                "right_colour": reading.colour == triple.colour,
            }
        )
    return rows
