"""The pictures that a run asks for: each has its prompt and a seed of its own."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .errors import EvalError

if TYPE_CHECKING:
    from agentsd.demo import Reference


@dataclass(frozen=True)
class Picture:
    """Picture `index` of a run; `concept` and `split` are known for the embedded model's prompts only."""

    index: int
    prompt: str
    seed: int
    concept: str | None = None
    split: str | None = None


def from_references(references: "Sequence[Reference]", images: int, seed: int) -> list[Picture]:
    """Return `images` pictures whose captions are spread evenly over the references.

    Asking for more pictures than captions starts over with new seeds.
    """
    count = len(references)
    step = max(count / images, 1.0)
    chosen = [references[int(i * step) % count] for i in range(images)]
    return [Picture(i, r.caption, seed + i, r.concept, r.split) for i, r in enumerate(chosen)]


def from_prompts(prompts: Sequence[str], images: int, seed: int) -> list[Picture]:
    """Return `images` pictures that go through `prompts` in order, again and again."""
    if not prompts:
        raise EvalError("there is no prompt to make a picture of")
    return [Picture(i, prompts[i % len(prompts)], seed + i) for i in range(images)]
