"""Images of the subject and of its class, drawn by step number so that a resumed run repeats itself."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

SUFFIXES = {".png", ".jpg", ".jpeg", ".webp", ".bmp"}


def image_paths(folder: Path) -> list[Path]:
    """What is an image by its name in a folder, by name."""
    return sorted(path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES)


def find_images(folder: Path) -> list[Path]:
    """Readable images of a folder, by name.

    Raises:
        ValueError: the folder is missing or empty, or one of its images cannot be read.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder: put the subject's images there")
    paths = image_paths(folder)
    if not paths:
        raise ValueError(f"{folder} has no image ({', '.join(sorted(SUFFIXES))}); 3 to 6 views are usual")
    for path in paths:
        try:
            with Image.open(path) as image:
                image.load()
        except (OSError, UnidentifiedImageError) as error:
            raise ValueError(f"{path} cannot be read as an image ({error}): mend or remove it") from None
    return paths


def load_image(path: Path, resolution: int) -> Tensor:
    """A image as (3, resolution, resolution) in [-1, 1]: its centre square, on white where transparent."""
    with Image.open(path) as opened:
        image = ImageOps.exif_transpose(opened).convert("RGBA")
    image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    image = ImageOps.fit(image, (resolution, resolution), Image.Resampling.LANCZOS)
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 127.5 - 1


@dataclass(frozen=True)
class Batch:
    """What one training step sees, all of it drawn from (seed, step, process).

    Attributes:
        pixels: (B, 3, H, W) in [-1, 1]; with class images, the second half of the batch.
        input_ids: (B, L) their prompts' tokens.
        generator: for the step's noise and timesteps.
    """

    pixels: Tensor
    input_ids: Tensor
    generator: torch.Generator


@dataclass(frozen=True)
class SubjectImages:
    """The instance images and, for prior preservation, the class images.

    Attributes:
        instance, classes: paths; `classes` may be empty.
        instance_ids, class_ids: (1, L) tokens of their prompts.
        resolution: pixels on a side.
    """

    instance: list[Path]
    classes: list[Path]
    instance_ids: Tensor
    class_ids: Tensor
    resolution: int

    def draw(self, batch_size: int, seed: int, step: int, process: int = 0) -> Batch:
        """The batch of a step: `batch_size` instance images and as many class images, if any."""
        generator = torch.Generator("cpu").manual_seed(hash((seed, step, process)) % 2**63)
        paths, ids = self._pick(self.instance, batch_size, generator), [self.instance_ids] * batch_size
        if self.classes:
            paths += self._pick(self.classes, batch_size, generator)
            ids += [self.class_ids] * batch_size
        pixels = torch.stack([load_image(path, self.resolution) for path in paths])
        return Batch(pixels, torch.cat(ids), generator)

    @staticmethod
    def _pick(paths: list[Path], count: int, generator: torch.Generator) -> list[Path]:
        return [
            paths[i] for i in torch.randint(len(paths), (count,), generator=generator, device="cpu").tolist()
        ]
