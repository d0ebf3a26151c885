"""What an image of a scene shows beside what its prompt asks for, for the bundled toy model."""

from collections.abc import Sequence

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


def read_scenes(images: Sequence[Image.Image], asked: Sequence[Triple], reader: ConceptReader) -> list[bool]:
    """Return for each image whether its concept is right."""
    right = []
    for image, triple in zip(images, asked, strict=True):
        reading = read_scene(image)
        right.append(reading.box is not None and reader.read(image, reading)[0] == triple.concept)
    return right
