"""The demonstration model's images: two lossless grids per style, and an index of labels."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Literal

from PIL import Image

Style = Literal["3d", "noto"]
Split = Literal["seen", "heldout"]

STYLES: tuple[Style, ...] = ("3d", "noto")
SIZE = 128
"""Pixels on a side of the model's images, and of every reference image."""
SPRITE = 64
"""Pixels on a side of a sprite in the grid of all concepts."""
LARGE: dict[Style, int] = {"3d": 256, "noto": 128}
"""Pixels on a side of the trained concepts' sprites, in a grid of their own: all that the art has."""
GRID_COLUMNS = 32
REFERENCES = Path(__file__).parent / "references"
PIPELINE = Path(__file__).parent / "pipeline"
SUBJECT = Path(__file__).parent / "subject"
"""Folder of views of one image that the model was never trained on, 128x128, for DreamBooth."""
_SPLIT_SEED = "agentsd-demo-0"
_HELDOUT_CONCEPTS = 0.2  # one style of a fifth of the concepts is a tenth of the pairs


@dataclass(frozen=True)
class Reference:
    """A labelled sprite (RGBA): of `LARGE` pixels for a trained concept, of `SPRITE` for any other.

    `caption` is the prompt that asks for it.
    """

    concept: str
    style: Style
    caption: str
    split: Split
    sprite: Image.Image = field(repr=False, compare=False)

    @cached_property
    def image(self) -> Image.Image:
        """The sprite on white (RGB), 128x128."""
        sprite = self.sprite.resize((SIZE, SIZE), Image.Resampling.LANCZOS)
        return Image.alpha_composite(Image.new("RGBA", sprite.size, "white"), sprite).convert("RGB")


def caption_of(concept: str, style: str | None) -> str:
    """Return the prompt for a concept in a style, such as "a 3d emoji of a kite", or in any."""
    plural = concept.endswith("s") and not concept.endswith(("ss", "us"))
    article = "" if plural else "an " if concept[0] in "aeiou" else "a "
    return f"{f'a {style}' if style else 'an'} emoji of {article}{concept}"


def split_of(concept: str, style: str) -> Split:
    """Return the fixed split of a (concept, style) pair, whatever else is trained on.

    A hash of the concept's name holds out one style of about a fifth of the concepts: a tenth of the
    pairs, and never both styles of one concept.
    """
    digest = hashlib.sha256(f"{_SPLIT_SEED}/{concept}".encode()).digest()
    if int.from_bytes(digest[:4]) / 2**32 >= _HELDOUT_CONCEPTS:
        return "seen"
    return "heldout" if style == STYLES[digest[4] % len(STYLES)] else "seen"


def _cell(grid: Image.Image, cell: int, side: int) -> Image.Image:
    top, left = (side * n for n in divmod(cell, GRID_COLUMNS))
    return grid.crop((left, top, left + side, top + side))


@cache
def _all_references() -> tuple[Reference, ...]:
    grids, large = (
        {style: Image.open(REFERENCES / f"{style}{kind}.webp").convert("RGBA") for style in STYLES}
        for kind in ("", "_large")
    )
    references = []
    for line in (REFERENCES / "index.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        style, cell, large_cell = row["style"], row.pop("cell"), row.pop("large", None)
        if large_cell is None:
            sprite = _cell(grids[style], cell, SPRITE)
        else:
            sprite = _cell(large[style], large_cell, LARGE[style])
        references.append(Reference(**row, sprite=sprite))
    return tuple(references)


def trained_concepts(folder: Path = PIPELINE) -> list[str]:
    """Return the names of the concepts that an exported model, the shipped one at first, was trained on."""
    return json.loads((folder / "training.json").read_text(encoding="utf-8"))["concepts"]


def load_references(
    trained_only: bool = True, concepts: Sequence[str] | Literal["all"] | None = None
) -> list[Reference]:
    """Return the labelled reference images, in a fixed order.

    `trained_only` keeps the concepts that the shipped model knows; `concepts` names the ones to keep
    instead ("all" for every one). An unknown name raises ValueError.
    """
    references = _all_references()
    if concepts is None:
        concepts = trained_concepts() if trained_only else "all"
    if concepts == "all":
        return list(references)
    known = {reference.concept for reference in references}
    if unknown := [concept for concept in concepts if concept not in known]:
        raise ValueError(f"no reference images of {unknown}; the names are in {REFERENCES / 'index.jsonl'}")
    wanted = set(concepts)
    return [reference for reference in references if reference.concept in wanted]
