"""What tells one model's weights from another's."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

import torch
from torch import Tensor


def weights_digest(model: Any) -> str:
    """A hash of the head of every tensor of a model: it changes with training, and is quick."""
    digest = sha256()
    for name, tensor in sorted(model.state_dict().items()):
        for part in _stored(tensor):
            head = part.detach().flatten()[:64].to("cpu", torch.float32)
            digest.update(name.encode() + head.numpy().tobytes())
    return digest.hexdigest()[:16]


def _stored(tensor: Any) -> list[Tensor]:
    """What a tensor is stored in: itself, or the plain tensors inside of a torchao weight."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    return [part for name in tensor.__tensor_flatten__()[0] for part in _stored(getattr(tensor, name))]
