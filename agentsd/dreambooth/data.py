"""Images of the subject and of its class, drawn by number so that a resumed run repeats itself."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor
from torch.utils.data import Dataset

SUFFIXES = {".png", ".jpg", ".jpeg", ".webp", ".bmp"}
_NOT_READ = {".avif", ".gif", ".heic", ".heif", ".jxl", ".tif", ".tiff"}

logger = logging.getLogger(__name__)


def image_paths(folder: Path, suffixes: set[str] = SUFFIXES) -> list[Path]:
    """What is an image by its name in a folder, by name; names with a dot in front are of other programs."""
    found = (path for path in folder.iterdir() if path.suffix.lower() in suffixes)
    return sorted(path for path in found if not path.name.startswith("."))


def find_images(folder: Path) -> list[Path]:
    """Readable images of a folder, by name; a warning names images of kinds that are not read.

    Raises:
        ValueError: the folder is missing or empty, or one of its images cannot be read.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder: put the subject's images there")
    if others := [path.name for path in image_paths(folder, _NOT_READ)]:
        logger.warning("%s: not read, save as PNG or JPEG: %s", folder, ", ".join(others))
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
        image = ImageOps.exif_transpose(opened)
    if image.mode.startswith("I"):  # 16 bits of grey, which `convert` clips at 255
        image = Image.fromarray((np.asarray(image) / 257).round().astype(np.uint8))
    image = image.convert("RGBA")
    image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    image = ImageOps.fit(image, (resolution, resolution), Image.Resampling.LANCZOS, centering=place)
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 127.5 - 1


@dataclass(frozen=True)
class Batch:
    """What one batch of training sees, all of it drawn from the seed and the batch's place in the run.

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

    Each of the two is gone through in passes, in another order each time; the batches of all processes, in
    turn, go on from one another.

    Attributes:
        instance, classes: paths; `classes` may be empty.
        instance_text, class_text: (1, ...) their prompts, tokens or embeddings.
        load: `load(path, place=...)` gives an image (C, H, W), or what was made of it ahead.
        batch_size: instance images in a batch, and as many class images, if any.
        seed: of the run.
        process, processes: the number of this one, and how many there are.
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
    processes: int = 1
    random_crop: bool = False

    def __getitem__(self, number: int) -> Batch:
        rng = torch.Generator("cpu").manual_seed(hash((self.seed, number, self.process)) % 2**63)
        paths, text = self._pick(self.instance, number, 0), [self.instance_text] * self.batch_size
        if self.classes:
            paths += self._pick(self.classes, number, 1)
            text += [self.class_text] * self.batch_size
        if self.random_crop:
            places = torch.rand(len(paths), 2, generator=rng, device="cpu").tolist()
        else:
            places = [(0.5, 0.5)] * len(paths)
        images = [self.load(path, place=(x, y)) for path, (x, y) in zip(paths, places, strict=True)]
        seed = torch.randint(2**62, (), generator=rng, device="cpu")
        return Batch(torch.stack(images), torch.cat(text), int(seed))

    def _pick(self, paths: list[Path], number: int, kind: int) -> list[Path]:
        def at(place: int) -> Path:
            done, i = divmod(place, len(paths))
            rng = torch.Generator("cpu").manual_seed(hash((self.seed, done, kind)) % 2**63)
            return paths[int(torch.randperm(len(paths), generator=rng, device="cpu")[i])]

        first = (number * self.processes + self.process) * self.batch_size
        return [at(first + i) for i in range(self.batch_size)]
