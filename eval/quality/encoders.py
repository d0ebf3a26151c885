"""CLIP and DINO: how well an image fits its prompt, and how alike two images' subjects are."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoModel, CLIPModel, CLIPProcessor

from ..errors import EvalError
from .features import Sources, open_image

_BATCH = 16


def _load(kind: Any, processor: Any, model: str, device: torch.device, name: str) -> tuple[Any, Any]:
    try:
        return kind.from_pretrained(model).eval().to(device), processor.from_pretrained(model)
    except (OSError, ValueError) as error:
        hub_id = {"clip": "openai/clip-vit-base-patch16", "dino": "facebook/dino-vits16"}[name]
        raise EvalError(
            f"can't load the {name.upper()} model {model!r}: {error}\nGive a folder or a hub id such as "
            f"{hub_id}, or leave {name} out."
        ) from error


def _batches(images: Sources) -> Iterator[list[Image.Image]]:
    for start in range(0, len(images), _BATCH):
        yield [open_image(image) for image in images[start : start + _BATCH]]


@torch.inference_mode()
def _embed(
    images: Sequence[Image.Image],
    processor: Any,
    device: torch.device,
    forward: Callable[[Any], torch.Tensor],
) -> np.ndarray:
    """Return what `forward` makes of the processor's pixels, (N, D)."""
    inputs = [processor(images=batch, return_tensors="pt").to(device) for batch in _batches(images)]
    return torch.cat([forward(one["pixel_values"]).float().cpu() for one in inputs]).numpy()


class ClipScore:
    """100 times the cosine of an image's and its prompt's embedding, at least 0 (Hessel et al. 2021).

    As torchmetrics has it; the model is a folder or a hub id, EvalError if it can't be loaded.
    """

    def __init__(self, model: str, device: torch.device) -> None:
        self._model, self._processor = _load(CLIPModel, CLIPProcessor, model, device, "clip")

    def embed(self, images: Sequence[Image.Image]) -> np.ndarray:
        """Return the embedding of each image, (N, D)."""
        model = self._model
        return _embed(
            images,
            self._processor,
            model.device,
            lambda pixels: model.visual_projection(model.vision_model(pixels).pooler_output),
        )

    @torch.inference_mode()
    def __call__(self, images: Sources, prompts: Sequence[str]) -> np.ndarray:
        """Return the score of each image, (N,)."""
        scores = []
        for number, batch in enumerate(_batches(images)):
            text = list(prompts[number * _BATCH :][: len(batch)])
            inputs = self._processor(
                text=text, images=batch, return_tensors="pt", padding=True, truncation=True
            )
            output = self._model(**inputs.to(self._model.device))
            scores += (output.image_embeds * output.text_embeds).sum(dim=1).tolist()
        return 100 * np.clip(np.array(scores), 0, None)


class Dino:
    """Images to the class token's last hidden state, as DreamBooth's DINO score has it (Ruiz et al. 2023).

    The model is a folder or a hub id, EvalError if it can't be loaded.
    """

    def __init__(self, model: str, device: torch.device) -> None:
        self._model, self._processor = _load(AutoModel, AutoImageProcessor, model, device, "dino")

    def __call__(self, images: Sequence[Image.Image]) -> np.ndarray:
        """Return the features of each image, (N, D)."""
        model = self._model
        return _embed(
            images, self._processor, model.device, lambda pixels: model(pixels).last_hidden_state[:, 0]
        )
