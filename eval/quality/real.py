"""The images that a row's are compared with: a folder's, or fresh scenes for the toy model."""

from dataclasses import dataclass

from ..files import image_files
from ..settings import RunSettings
from .features import Sources


@dataclass(frozen=True)
class Real:
    """Real images, and the height and width that photographs are brought to."""

    images: Sources
    crop: tuple[int, int] | None = None


def load_real(settings: RunSettings, height: int, width: int) -> Real | None:
    """Return the images to measure distances to, or None: another model without --reference has none.

    Photographs of a folder are brought to the size of the generated ones (the paper doesn't say what it
    does): scaled to cover it, then cut from the centre. Scenes are made at that size. A trial takes as many
    as it makes images.
    """
    most = None if settings.limit is None else max(settings.limit, 8)
    if settings.reference:
        return Real(image_files(settings.reference)[:most], (height, width))
    if settings.model != "demo" or height != width or not settings.references:
        return None
    from agentsd_demo.data import trained_concepts

    from .scenes import fresh_scenes

    count = min(settings.references, most or settings.references)
    return Real([scene.image for scene in fresh_scenes(trained_concepts(), height, count)])
