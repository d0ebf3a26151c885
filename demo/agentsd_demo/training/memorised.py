"""Whether images were learnt by heart: how near each is to the nearest scene of the training."""

import json
from collections.abc import Sequence
from pathlib import Path

from PIL import Image
from torch import Tensor

from ..scenes import triples
from .config import DemoConfig
from .diffusion import SceneBatches, canvas_size


def training_scenes(folder: Path, size: int, count: int) -> list[Image.Image]:
    """Return the last scenes of `size` pixels that an exported pipeline's last round was trained on."""
    training = json.loads((folder / "training.json").read_text(encoding="utf-8"))
    config = DemoConfig.model_validate(training["recipe"])
    batches = SceneBatches(triples("seen", training["concepts"]), config.diffusion, config.seed)
    scenes: list[Image.Image] = []
    steps = training["last"]["step"] if training["last"] else 0  # an export may be the start itself
    for step in reversed(range(steps)):
        if len(scenes) < count and canvas_size(config.diffusion, step, config.seed) == size:
            scenes += [Image.fromarray(pixels) for pixels in batches[step][1].numpy()]
    return scenes[:count]


def nearest_similarities(features: Tensor, known: Tensor) -> Sequence[float]:
    """Return the cosine of each row of `features` (N, D) to the most similar of `known` (M, D), unit rows."""
    nearest: list[float] = (features @ known.T).max(1).values.tolist()
    return nearest
