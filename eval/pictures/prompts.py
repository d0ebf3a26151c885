"""The pictures that a run asks for: each has its prompt and a seed of its own."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import EvalError
from ..pages.output import read_lines
from ..settings import RunSettings

if TYPE_CHECKING:
    from agentsd_demo.scenes import Triple


@dataclass(frozen=True)
class Picture:
    """Picture `index` of a run; `triple`, what it is to show, is known of the embedded model's prompts only."""

    index: int
    prompt: str
    seed: int
    triple: "Triple | None" = None

    @property
    def split(self) -> str | None:
        """Whether the embedded model was trained on what it is to show."""
        return None if self.triple is None else self.triple.split


def from_triples(triples: "Sequence[Triple]", images: int, seed: int) -> list[Picture]:
    """Return `images` pictures whose captions are spread evenly over what scenes can show.

    Asking for more pictures than captions starts over with new seeds.
    """
    count = len(triples)
    step = max(count / images, 1.0)
    chosen = [triples[int(i * step) % count] for i in range(images)]
    return [Picture(i, triple.caption, seed + i, triple) for i, triple in enumerate(chosen)]


def from_prompts(prompts: Sequence[str], images: int, seed: int) -> list[Picture]:
    """Return `images` pictures that go through `prompts` in order, again and again."""
    if not prompts:
        raise EvalError("there is no prompt to make a picture of")
    return [Picture(i, prompts[i % len(prompts)], seed + i) for i in range(images)]


def from_classes(classes: Sequence[str], template: str, per_class: int, seed: int) -> list[Picture]:
    """Return `per_class` pictures of each class (Appendix B.2 of the paper: 2 of each ImageNet class)."""
    prompts = [template.replace("{cls}", name) for name in classes for _ in range(per_class)]
    return from_prompts(prompts, len(prompts), seed)


def pictures_of(settings: RunSettings) -> list[Picture]:
    """Return the pictures of a run: of its classes, its prompts, or the embedded model's captions.

    Raises EvalError if a file is missing or empty, or if another model is given no prompts.
    """
    if settings.classes and settings.prompts:
        raise EvalError(f"give prompts ({settings.prompts}) or classes ({settings.classes}), not both")
    if settings.classes:
        names = read_lines(settings.classes)
        return from_classes(names, settings.template, settings.per_class, settings.seed)
    if settings.prompts:
        return from_prompts(read_lines(settings.prompts), settings.images, settings.seed)
    if settings.model != "demo":
        raise EvalError(
            f"the model {settings.model!r} has no prompts of its own: give --prompts or --classes FILE"
        )
    from agentsd_demo.scenes import triples

    return from_triples(triples(), settings.images, settings.seed)
