"""Trained attention on the patched layers: its module, its weights in a file, and the way back."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import Module, Parameter

from .config import AgentConfig
from .hosts import Site
from .modules import build_core

FILE_NAME = "agentsd.safetensors"
CORE = "agentsd_core"
PROJECTIONS = ("to_q", "to_k", "to_v", "to_out.0")


def attach_core(site: Site, config: AgentConfig, sample_size: int | Sequence[int]) -> None:
    """Give a layer the trainable module that `config.attention` names, made for the model's own size.

    It is a submodule, so that it moves, trains and is saved with the model.
    """
    attn: Any = site.attn
    sides = (sample_size, sample_size) if isinstance(sample_size, int) else tuple(sample_size)
    height, width = site.grid(torch.empty(1, 1, *sides, device="meta"))
    parts = {part: part in config.parts for part in ("bias", "convolution")}
    settings: dict[str, Any] = {}
    if config.attention == "module":
        cells = (height // config.early_stride) * (width // config.early_stride)
        agents = sum(config.agent_counts) or max(1, cells)
        settings = {"grid": (height, width), "agents": agents, "scale": config.scale, "k": config.k, **parts}
    elif config.attention == "focused":
        settings = {"convolution": parts["convolution"]}
    kind = {"module": "agent"}.get(config.attention, config.attention)
    weight = _linear(attn, "to_q").weight
    with torch.random.fork_rng(devices=[]):  # the same start each time, and the user's random state as it was
        torch.manual_seed(config.seed)
        core = build_core(kind, attn.heads, weight.shape[0] // attn.heads, **settings)
    attn.add_module(CORE, core.to(weight.device, weight.dtype))


def detach_core(attn: Any) -> None:
    """Take the module away again, if there is one."""
    if hasattr(attn, CORE):
        delattr(attn, CORE)


def weights_of(layers: Sequence[tuple[str, Any]]) -> dict[str, Parameter]:
    """What is trained: the named layers' modules and projections, by name."""
    found: dict[str, Parameter] = {}
    for name, attn in layers:
        parts: list[tuple[str, Module]] = [(part, _linear(attn, part)) for part in PROJECTIONS]
        if hasattr(attn, CORE):
            parts.append((CORE, getattr(attn, CORE)))
        for part, module in parts:
            found |= {f"{name}.{part}.{key}": value for key, value in module.named_parameters()}
    return found


def save_weights(layers: Sequence[tuple[str, Any]], folder: str | Path) -> Path:
    """Write the layers' weights to `agentsd.safetensors` in a folder; returns its path."""
    path = Path(folder) / FILE_NAME
    save_file({name: weight.detach().cpu().contiguous() for name, weight in weights_of(layers).items()}, path)
    return path


def load_weights(layers: Sequence[tuple[str, Any]], folder: str | Path) -> dict[str, Tensor]:
    """Put a folder's weights in the layers.

    Returns:
        What was in the projections before, for `restore_weights`.

    Raises:
        ValueError: the file cannot be read, or belongs to other layers or settings; nothing is changed.
    """
    path = Path(folder) / FILE_NAME
    try:
        loaded = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} cannot be read ({error}): save it again with AgentHandle.save") from None
    weights = weights_of(layers)
    wrong = set(loaded) ^ set(weights) or {n for n, w in weights.items() if w.shape != loaded[n].shape}
    if wrong:
        raise ValueError(f"{path} does not fit this model and its agentsd.json: {sorted(wrong)[0]} differs")
    before = {name: weight.data for name, weight in weights.items() if f".{CORE}." not in name}
    for name, weight in weights.items():
        weight.data = loaded[name].to(weight.device, weight.dtype)
    return before


def restore_weights(layers: Sequence[tuple[str, Any]], before: dict[str, Tensor]) -> None:
    """Put back what `load_weights` returned."""
    weights = weights_of(layers)
    for name, data in before.items():
        weights[name].data = data.to(weights[name].device, weights[name].dtype)


def _linear(attn: Any, part: str) -> Any:
    """A projection of a layer, under its LoRA wrapper if it has one."""
    module = attn.get_submodule(part)
    return getattr(module, "base_layer", module)
