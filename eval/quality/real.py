"""The images that a row's are compared with: a folder's, or fresh scenes for the toy model."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from PIL import Image

from ..settings import RunSettings
from .features import image_files, user_cache


@dataclass(frozen=True)
class Real:
    """Real images, and what is known of them.

    Attributes:
        images: loaded, or their files.
        crop: height and width that photographs are brought to.
        cache: folder of their features, where other runs find them.
    """

    images: Sequence[Image.Image] | Sequence[Path]
    crop: tuple[int, int] | None = None
    cache: Path = field(default_factory=lambda: user_cache() / "features")


def load_real(settings: RunSettings, height: int, width: int) -> Real | None:
    """Return the images to measure distances to, or None: another model without --reference has none.

    Photographs of a folder are brought to the size of the generated ones (the paper doesn't say what it
    does): scaled to cover it, then cut from the centre. Scenes are made at that size.
    """
    if settings.reference:
        return Real(image_files(settings.reference)[: settings.most_references], (height, width))
    if settings.model != "demo" or height != width:
        return None
    from agentsd_demo.data import trained_concepts

    from .scenes import fresh_scenes

    count = min(settings.references, settings.most_references or settings.references)
    return Real([scene.image for scene in fresh_scenes(trained_concepts(), height, count)])
