"""Make the images of a run: shared among processes, resumed where it stopped, methods taking turns."""

import hashlib
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from PIL import Image

from ..settings import FolderSettings, RunSettings
from .digest import parts_digest
from .methods import Method
from .models import find_device
from .prompts import ImageSpec
from .sampling import Seconds, sample, size_of, warm_up
from .store import DIGITS, LISTING, Store

TURNS = 3
"""Batches of a run at the least, where it has the images, so that a slow moment is not one method's alone."""
RETIMED = 8
"""Of baseline images from an earlier session, how many batches are timed again, for new rows' speed-ups."""


@dataclass(frozen=True)
class Share:
    """This process's part of the batches: number `rank` of `world`."""

    rank: int = 0
    world: int = 1


def fingerprint(pipe: Any, specs: Sequence[ImageSpec], settings: RunSettings) -> dict[str, Any]:
    """Return what makes the images of a run comparable: all that they depend on but the method.

    The number of threads and the batch's size change their last bits alone: a run may go on with others, and
    with more images.
    """
    listed = [hashlib.sha256(f"{spec.seed} {spec.prompt}".encode()).hexdigest()[:DIGITS] for spec in specs]
    height, width = size_of(pipe, settings)
    return {
        "model": settings.model,
        **parts_digest(pipe),
        "dtype": settings.dtype,
        "device": find_device(settings.device).type,
        "scheduler": settings.scheduler,
        "steps": settings.steps,
        "guidance_scale": settings.guidance_scale,
        "height": height,
        "width": width,
        LISTING: "".join(listed),
    }


def generate(
    pipe: Any,
    store: Store,
    methods: Sequence[Method],
    specs: Sequence[ImageSpec],
    settings: FolderSettings,
    share: Share,
    report: Callable[[int], None],
) -> None:
    """Make every image of this process's share that isn't on disk, unharmed, already.

    Methods take turns at each batch, so that their times compare and a run stopped early has the same
    images of each. Batches are the same whoever makes them and when: an image's last bits depend on its
    batch's size (and, under tomesd, its merging on the batch), so a damaged image is made again with it.
    Rows that join baseline's images later get them timed again, a few batches of them.
    `report` is called with the number of images that are done.
    """
    done = {method: store.intact(method) for method in methods}
    session = uuid.uuid4().hex[:12]
    warm: set[Method] = set()
    retimed = 0

    def timed(method: Method, batch: Sequence[ImageSpec]) -> tuple[list[Image.Image], Seconds]:
        if method not in warm:
            warm_up(pipe, method, batch, settings)
            warm.add(method)
        return sample(pipe, method, batch, settings)

    size = min(settings.batch_size, -(-len(specs) // TURNS))
    for number, start in enumerate(range(0, len(specs), size)):
        batch = specs[start : start + size]
        if number % share.world != share.rank:
            continue
        missing = [m for m in methods if not all(spec.index in done[m] for spec in batch)]
        if missing and methods[0] not in missing and retimed < RETIMED:
            _, seconds = timed(methods[0], batch)
            made = [done[methods[0]][spec.index] for spec in batch]
            store.save_time(methods[0], number, made, seconds, session)
            retimed += 1
        for method in methods:
            if method in missing:
                images, seconds = timed(method, batch)
                store.save(method, number, batch, images, seconds, session)
            report(len(batch))
