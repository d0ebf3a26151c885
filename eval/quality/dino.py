"""How alike two images' subjects are, by a self-supervised ViT (DINO)."""

from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoModel

from ..errors import EvalError

_BATCH = 16


class Dino:
    """Images to the class token's last hidden state, as DreamBooth's DINO score has it (Ruiz et al. 2023).

    The model is a folder or a hub id, EvalError if it can't be loaded.
    """

    def __init__(self, model: str, device: torch.device) -> None:
        try:
            self._model = AutoModel.from_pretrained(model).eval().to(device)
            self._processor = AutoImageProcessor.from_pretrained(model)
        except (OSError, ValueError) as error:
            raise EvalError(
                f"can't load the DINO model {model!r}: {error}\nGive a folder or a hub id such as "
                "facebook/dino-vits16, or leave dino out."
            ) from error

    @torch.inference_mode()
    def __call__(self, images: Sequence[Image.Image]) -> np.ndarray:
        """Return the features of each image, (N, D)."""
        found = []
        for start in range(0, len(images), _BATCH):
            batch = [image.convert("RGB") for image in images[start : start + _BATCH]]
            inputs = self._processor(images=batch, return_tensors="pt").to(self._model.device)
            found.append(self._model(**inputs).last_hidden_state[:, 0].float().cpu())
        return torch.cat(found).numpy()
