"""What tells one model from another: all of a pipeline that its images depend on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor, nn

_COLUMNS = 61
"""In which bits are summed: of no tensor's rows a divisor, so that rows that change places are seen."""


def parts_digest(pipe: Any) -> dict[str, str]:
    """A hash of each part of a pipeline: "unet_digest" is of its weights and settings, and so on."""
    parts = {name: part for name, part in pipe.components.items() if part is not None}
    found = {name: _digest_of(part) for name, part in parts.items()}
    found["pipeline"] = _in_short(type(pipe), {n: v for n, v in pipe.config.items() if n not in parts})
    return {f"{name}_digest": digest for name, digest in sorted(found.items()) if digest}


def _digest_of(part: Any) -> str | None:
    """Of a model, a tokenizer or a scheduler; None of what takes no part in text to image."""
    if hasattr(part, "get_vocab"):  # all its words in a row show how it splits them
        ids = [part(" ".join(sorted(part.get_vocab())), verbose=False)["input_ids"]]
        ids += [part("", padding="max_length", truncation=True)["input_ids"]]
        return sha256(json.dumps(ids).encode()).hexdigest()[:16]
    if not hasattr(part, "config"):
        return None
    config = part.config if isinstance(part.config, Mapping) else part.config.to_diff_dict()
    settings = _in_short(type(part), config)
    return settings if not isinstance(part, nn.Module) else f"{weights_digest(part)}-{settings[:4]}"


def _in_short(kind: type, config: Mapping[str, Any]) -> str:
    """A hash of settings, but of where they were loaded from and by what."""
    apart = {"transformers_version", "dtype", "torch_dtype"}
    kept = {name: value for name, value in config.items() if name[0] != "_" and name not in apart}
    text = json.dumps([kind.__name__, kept], sort_keys=True, default=lambda value: type(value).__name__)
    return sha256(text.encode()).hexdigest()[:16]


def weights_digest(model: Any) -> str:
    """A hash of every tensor's shape, and of sums of its bits: quick, and the same on all devices."""
    digest = sha256()
    for name, tensor in sorted(model.state_dict().items()):
        for part in _stored(tensor):
            content = part.detach().flatten().view(torch.uint8)
            whole = len(content) - len(content) % (8 * _COLUMNS)
            totals = content[:whole].view(torch.int64).view(-1, _COLUMNS).sum(0).tolist()  # they wrap around
            told = [name, str(part.dtype), list(part.shape), totals, content[whole:].tolist()]
            digest.update(json.dumps(told).encode())
    return digest.hexdigest()[:16]


def _stored(tensor: Any) -> list[Tensor]:
    """What a tensor is stored in: itself, or the plain tensors inside of a torchao weight."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    return [part for name in tensor.__tensor_flatten__()[0] for part in _stored(getattr(tensor, name))]
