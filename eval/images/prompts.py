"""The images that a run asks for: each has its prompt and a seed of its own."""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from ..errors import EvalError
from ..files import read_lines
from ..intervals import FEWEST
from ..settings import SEEDS, RunSettings, Settings, ShowSettings

if TYPE_CHECKING:
    from agentsd_demo.scenes import SceneSplit, Triple

SHIPPED = Path(__file__).with_name("prompts.txt")
"""Prompts for any model."""


@dataclass(frozen=True)
class ImageSpec:
    """Image `index` of a run; `triple`, what it is to show, is known for the toy model alone."""

    index: int
    prompt: str
    seed: int
    triple: "Triple | None" = None

    def __post_init__(self) -> None:
        if not 0 <= self.seed < SEEDS:
            raise EvalError(
                f"image {self.index} would have seed {self.seed}: torch tells {SEEDS:,} seeds apart, from 0 "
                "on; pass a smaller --seed"
            )


def from_triples(triples: "Sequence[Triple]", images: int, seed: int) -> list[ImageSpec]:
    """Return `images` images, the first of any more, whose captions are spread over what scenes can show.

    Asking for more images than captions starts over with new seeds.
    """
    count = len(triples)
    # A stride near the golden section of the list, and coprime to it: no part is missed, whatever the number.
    stride = next(n for n in range(round(count * 0.382), 2 * count) if math.gcd(n, count) == 1)
    chosen = [triples[i * stride % count] for i in range(images)]
    return [ImageSpec(i, triple.caption, seed + i, triple) for i, triple in enumerate(chosen)]


def from_prompts(prompts: Sequence[str], images: int, seed: int) -> list[ImageSpec]:
    """Return `images` images that go through `prompts` in order, again and again."""
    if not prompts:
        raise EvalError("there is no prompt to make an image of")
    return [ImageSpec(i, prompts[i % len(prompts)], seed + i) for i in range(images)]


def from_classes(classes: Sequence[str], seed: int) -> list[ImageSpec]:
    """Return two images of each class by the paper's prompt (Appendix B.2)."""
    prompts = [f"A high quality photograph of a {name}." for name in classes for _ in range(2)]
    return from_prompts(prompts, len(prompts), seed)


def specs_to_show(settings: ShowSettings) -> list[ImageSpec]:
    """Return an image for each prompt of the settings, else `images` images.

    Without prompts, they are of the toy model's captions, and for any other model of prompts that ship.
    """
    if settings.prompt:
        return from_prompts(settings.prompt, len(settings.prompt), settings.seed)
    return prompts_of(settings.model, settings.images, settings.seed)


def prompts_of(model: str, images: int, seed: int, split: "SceneSplit | None" = None) -> list[ImageSpec]:
    """Return images of the toy model's captions, all or a split of them; of prompts that ship for others."""
    if model != "demo":
        return from_prompts(read_lines(SHIPPED), images, seed)
    from agentsd_demo.scenes import triples

    return from_triples(triples(split), images, seed)


def note_unknown_words(pipe: Any, specs: Sequence[ImageSpec], settings: Settings, console: Console) -> None:
    """Say which words of the prompts the toy model was never taught."""
    if settings.model != "demo":
        return
    if words := unknown_words(pipe.tokenizer, [spec.prompt for spec in specs]):
        named = ", ".join(map(repr, words[:8]))
        console.print(f"note: the toy model was never taught {named}; its captions are in agentsd_demo")


def note_too_few(specs: Sequence[ImageSpec], console: Console) -> None:
    """Say before a run what it will leave open."""
    captions = len({spec.prompt for spec in specs})
    if captions < FEWEST:
        console.print(
            f"note: {len(specs)} images a row, of {captions} prompts, are too few for intervals, and to say "
            f"what gains: take {FEWEST} prompts or more"
        )


def unknown_words(tokenizer: Any, prompts: Sequence[str]) -> list[str]:
    """Return the words of prompts that stand in no caption and are no token by themselves, in order."""
    from agentsd_demo.scenes import triples

    def words_of(texts: Iterable[str]) -> list[str]:
        return list(dict.fromkeys(word for text in texts for word in re.findall(r"[^\W_]+", text.lower())))

    taught = set(words_of(triple.caption for triple in triples()))
    tokens = tokenizer.get_vocab()
    return [word for word in words_of(prompts) if word not in taught and f"{word}</w>" not in tokens]


def specs_of(settings: RunSettings) -> list[ImageSpec]:
    """Return the images of a run: of its classes, its prompts, or those of any run of the model.

    Raises EvalError if a file is missing or empty.
    """
    if settings.classes:
        names = read_lines(settings.classes)
        if "images" in settings.model_fields_set:
            raise EvalError(
                f"images = {settings.images}: the classes ask for {2 * len(names)}, two of each; leave it "
                f"out, or try fewer with --limit {settings.images}"
            )
        return from_classes(names, settings.seed)[: settings.limit]
    count = min(settings.images, settings.limit or settings.images)
    if settings.prompts:
        return from_prompts(read_lines(settings.prompts), count, settings.seed)
    return prompts_of(settings.model, count, settings.seed)
