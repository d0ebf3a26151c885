"""The demonstration model's images: one lossless grid per style, and an index of labels."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Literal

from PIL import Image

Style = Literal["3d", "noto"]
Split = Literal["seen", "heldout"]

STYLES: tuple[Style, ...] = ("3d", "noto")
SIZE = 64
"""Pixels on a side of every reference image."""
GRID_COLUMNS = 32
REFERENCES = Path(__file__).parent / "references"
PIPELINE = Path(__file__).parent / "pipeline"
"""The 48 directions (48, 1280) of greatest variance of EfficientNet-Lite0's features of 4,096 scenes."""
SUBJECT = Path(__file__).parent / "subject"
"""Folder of views of one image that the model was never trained on, 64x64, for DreamBooth."""
_SPLIT_SEED = "agentsd-demo-0"
_HELDOUT_CONCEPTS = 0.2  # one style of a fifth of the concepts is a tenth of the pairs


@dataclass(frozen=True)
class Reference:
    """A labelled image, 64x64; `caption` is the prompt that asks for it.

    `sprite` is RGBA, `image` the same on white (RGB).
    """

    concept: str
    style: Style
    caption: str
    split: Split
    sprite: Image.Image = field(repr=False, compare=False)
    image: Image.Image = field(repr=False, compare=False)


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


@cache
def _all_references() -> tuple[Reference, ...]:
    grids = {style: Image.open(REFERENCES / f"{style}.webp").convert("RGBA") for style in STYLES}
    references = []
    for line in (REFERENCES / "index.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        top, left = (SIZE * n for n in divmod(row.pop("cell"), GRID_COLUMNS))
        sprite = grids[row["style"]].crop((left, top, left + SIZE, top + SIZE))
        white = Image.new("RGBA", sprite.size, "white")
        image = Image.alpha_composite(white, sprite).convert("RGB")
        references.append(Reference(**row, sprite=sprite, image=image))
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
