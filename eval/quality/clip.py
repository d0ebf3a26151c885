"""How well an image fits its prompt, by a CLIP model."""

from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image
from transformers import CLIPModel, CLIPProcessor

from ..errors import EvalError

_BATCH = 16


class ClipScore:
    """100 times the cosine of an image's and its prompt's embedding, at least 0 (Hessel et al. 2021).

    As torchmetrics has it; the model is a folder or a hub id, EvalError if it can't be loaded.
    """

    def __init__(self, model: str, device: torch.device) -> None:
        try:
            self._model = CLIPModel.from_pretrained(model).eval().to(device)
            self._processor = CLIPProcessor.from_pretrained(model)
        except (OSError, ValueError) as error:
            raise EvalError(
                f"can't load the CLIP model {model!r}: {error}\nGive a folder or a hub id such as "
                "openai/clip-vit-base-patch16, or leave clip out."
            ) from error

    @torch.inference_mode()
    def embed(self, images: Sequence[Image.Image]) -> np.ndarray:
        """Return the embedding of each image, (N, D)."""
        found = []
        for start in range(0, len(images), _BATCH):
            batch = [image.convert("RGB") for image in images[start : start + _BATCH]]
            inputs = self._processor(images=batch, return_tensors="pt").to(self._model.device)
            pooled = self._model.vision_model(pixel_values=inputs["pixel_values"]).pooler_output
            found.append(self._model.visual_projection(pooled).float().cpu())
        return torch.cat(found).numpy()

    @torch.inference_mode()
    def __call__(self, images: Sequence[Image.Image], prompts: Sequence[str]) -> np.ndarray:
        """Return the score of each image, (N,)."""
        scores = []
        for start in range(0, len(images), _BATCH):
            part = slice(start, start + _BATCH)
            inputs = self._processor(
                text=list(prompts[part]),
                images=list(images[part]),
                return_tensors="pt",
                padding=True,
                truncation=True,
            )
            output = self._model(**inputs.to(self._model.device))
            scores += (output.image_embeds * output.text_embeds).sum(dim=1).tolist()
        return 100 * np.clip(np.array(scores), 0, None)
