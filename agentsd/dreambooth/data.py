"""Images of the subject and of its class, drawn by number so that a resumed run repeats itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor
from torch.utils.data import Dataset

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
        except (OSError, UnidentifiedImageError, Image.DecompressionBombError) as error:
            raise ValueError(f"{path} cannot be read as an image ({error}): mend or remove it") from None
    return paths


def load_image(path: Path, resolution: int, place: tuple[float, float] = (0.5, 0.5)) -> Tensor:
    """An image as (3, resolution, resolution) in [-1, 1], on white where it is transparent.

    Args:
        path: the file.
        resolution: pixels on a side.
        place: where its largest square is cut out, from (0, 0), top left, to (1, 1); by default the centre.
    """
    with Image.open(path) as opened:
        image = ImageOps.exif_transpose(opened).convert("RGBA")
    image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    image = ImageOps.fit(image, (resolution, resolution), Image.Resampling.LANCZOS, centering=place)
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 127.5 - 1


@dataclass(frozen=True)
class Batch:
    """What one batch of training sees, all of it drawn from (seed, number, process).

    Attributes:
        images: (B, ...), what `SubjectImages.load` gives; with class images, the second half of the batch.
        text: (B, ...) their prompts, tokens or embeddings.
        seed: of the batch's noise and timesteps.
    """

    images: Tensor
    text: Tensor
    seed: int


@dataclass(frozen=True)
class SubjectImages(Dataset[Batch]):
    """The instance images and, for prior preservation, the class images; item n is batch n.

    Attributes:
        instance, classes: paths; `classes` may be empty.
        instance_text, class_text: (1, ...) their prompts, tokens or embeddings.
        load: `load(path, place=...)` gives an image (C, H, W), or what was made of it ahead.
        batch_size: instance images in a batch, and as many class images, if any.
        seed, process: of the run, and the number of its process.
        random_crop: whether another square is cut out of an image at each draw.
    """

    instance: list[Path]
    classes: list[Path]
    instance_text: Tensor
    class_text: Tensor
    load: Callable[..., Tensor]
    batch_size: int
    seed: int
    process: int = 0
    random_crop: bool = False

    def __getitem__(self, number: int) -> Batch:
        rng = torch.Generator("cpu").manual_seed(hash((self.seed, number, self.process)) % 2**63)
        paths, text = self._pick(self.instance, rng), [self.instance_text] * self.batch_size
        if self.classes:
            paths += self._pick(self.classes, rng)
            text += [self.class_text] * self.batch_size
        if self.random_crop:
            places = torch.rand(len(paths), 2, generator=rng, device="cpu").tolist()
        else:
            places = [(0.5, 0.5)] * len(paths)
        images = [self.load(path, place=(x, y)) for path, (x, y) in zip(paths, places, strict=True)]
        seed = torch.randint(2**62, (), generator=rng, device="cpu")
        return Batch(torch.stack(images), torch.cat(text), int(seed))

    def _pick(self, paths: list[Path], rng: torch.Generator) -> list[Path]:
        picked = torch.randint(len(paths), (self.batch_size,), generator=rng, device="cpu")
        return [paths[i] for i in picked.tolist()]
