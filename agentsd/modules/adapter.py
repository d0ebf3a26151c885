"""Trained attention on the patched layers: its module, its weights in a file, and the way back."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save_file
from torch import Tensor
from torch.nn import Module, Parameter

from ..attention.operator import MODULE
from ..hosts import AttentionLayer
from .agent import AgentAttention, resize_agents
from .operators import TrainedOperator

FILE_NAME = "agentsd.safetensors"
PROJECTIONS = ("to_q", "to_k", "to_v", "to_out.0")


def build_module(layer: AttentionLayer, operator: TrainedOperator, seed: int, model: Any) -> Module:
    """The trainable module of a layer, made for the model's own size; nothing is changed.

    Raises:
        ValueError: the model's size is not known, or its weights are not on this machine.
    """
    attn: Any = layer.attn
    height, width = layer.grid(torch.empty(1, 1, *size_of(model), device="meta"))
    weight = _linear(attn, "to_q").weight
    if weight.device.type == "meta":
        raise ValueError(
            f"{layer.name}.to_q.weight is on the device 'meta' (sequential offloading keeps it elsewhere): "
            "apply a trained recipe before pipe.enable_sequential_cpu_offload()"
        )
    with torch.device("meta"):  # where nothing is drawn: the user's random state is not touched
        module: Any = operator.build(attn.heads, attn.inner_dim // attn.heads, (height, width))
    module.to_empty(device="cpu")
    module.reset(torch.Generator("cpu").manual_seed(seed))  # the same start each time
    return module.to(weight.device, model.dtype)  # not the weight's own dtype, which may be for storage alone


NamedLayer: TypeAlias = tuple[str, Any, Module | None]
"""A patched layer: its name, itself, and its trainable module."""
Layers: TypeAlias = Sequence[NamedLayer]


def weights_of(layers: Layers) -> dict[str, Parameter]:
    """What is trained: the named layers' modules and projections, by name."""
    found: dict[str, Parameter] = {}
    for name, attn, own in layers:
        parts: list[tuple[str, Module]] = [(part, _linear(attn, part)) for part in PROJECTIONS]
        if own is not None:
            parts.append((MODULE, own))
        for part, module in parts:
            found |= {f"{name}.{part}.{key}": value for key, value in module.named_parameters()}
    return found


def check_plain(layers: Layers, way_out: str) -> None:
    """Raise ValueError where a projection's weights are not numbers at hand: quantised, or offloaded."""
    for name, attn, _ in layers:
        for part in PROJECTIONS:
            for key, weight in _linear(attn, part).named_parameters():
                if is_quantized(weight):
                    kind = type(weight).__name__
                    raise ValueError(f"{name}.{part}.{key} is quantised ({kind}): {way_out}")
                if weight.device.type == "meta":
                    raise ValueError(
                        f"{name}.{part}.{key} is on the device 'meta', as sequential offloading keeps it "
                        "elsewhere: call pipe.remove_all_hooks() first, and offload again afterwards"
                    )


def save_weights(layers: Layers, folder: str | Path) -> Path:
    """Write the layers' weights to `agentsd.safetensors` in a folder; returns its path."""
    path = Path(folder) / FILE_NAME
    save_file({name: weight.detach().cpu().contiguous() for name, weight in weights_of(layers).items()}, path)
    return path


def read_weights(folder: str | Path) -> dict[str, Tensor]:
    """A folder's weights by name.

    Raises:
        ValueError: the file cannot be read, or holds what is no weight.
    """
    path = Path(folder) / FILE_NAME
    try:
        loaded = load(path.read_bytes())  # not mapped: the file may change while its weights are in use
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} cannot be read ({error}): save it again with AgentSDHandle.save") from None
    for name, weight in loaded.items():
        if not weight.is_floating_point() or not weight.isfinite().all():
            kind = weight.dtype if not weight.is_floating_point() else "not finite"
            raise ValueError(f"{path}: {name} is {kind}: save it again with AgentSDHandle.save")
    return loaded


def resize_loaded(layers: Layers, loaded: dict[str, Tensor]) -> dict[str, Tensor]:
    """Loaded weights, of which agent biases for other numbers of agents are made to fit."""
    fitted = dict(loaded)
    for name, _, module in layers:
        if isinstance(module, AgentAttention):
            for key, own in module.named_parameters():
                saved = loaded.get(f"{name}.{MODULE}.{key}")
                if "_bias." not in key or saved is None or saved.ndim != 4:
                    continue
                if saved.shape[1] != own.shape[1]:
                    wanted = module.rows, module.cols
                    fitted[f"{name}.{MODULE}.{key}"] = resize_agents(saved, module.grid, wanted)
    return fitted


def check_fit(layers: Layers, loaded: dict[str, Tensor], where: str | Path) -> None:
    """Raise ValueError where weights belong to other layers or settings, or can't take the place of these."""
    check_plain(layers, "load trained weights into the model unquantised, and quantise it then")
    weights = weights_of(layers)
    wrong = set(loaded) ^ set(weights) or {n for n, w in weights.items() if w.shape != loaded[n].shape}
    if wrong:
        raise ValueError(
            f"{where} does not fit this model and the recipe beside it: {sorted(wrong)[0]} differs"
        )


def size_of(model: Any) -> tuple[int, int]:
    """Height and width of the latents that a model was made for.

    Raises:
        ValueError: its config does not say.
    """
    size = getattr(model.config, "sample_size", None)
    if size is None:
        raise ValueError(
            f"sample_size=None: {type(model).__name__} does not say its size, which a trained module is made "
            "for; call model.register_to_config(sample_size=64) first, with the latents' side"
        )
    return (size, size) if isinstance(size, int) else tuple(size)


def is_quantized(weight: Tensor) -> bool:
    """Whether a weight is stored as integers (bitsandbytes, GGUF) or in a class of its own (torchao)."""
    kind = type(weight)
    return not weight.is_floating_point() or not (kind in (Parameter, Tensor) or kind.__name__ == "DTensor")


class LoadedWeights:
    """Weights that stand in the layers in place of others, and the way back."""

    def __init__(self, layers: Layers, loaded: dict[str, Tensor]) -> None:
        self._before: dict[str, Tensor] = {}
        self._given: dict[str, Tensor] = {}
        self._fused = _fused(layers)
        for name, weight in weights_of(layers).items():
            given = loaded[name].to(weight.device, weight.dtype)
            if f".{MODULE}." not in name:
                self._before[name], self._given[name] = weight.data, given
            weight.data = given.clone()

    def restore(self, layers: Layers) -> None:
        """Put back what was there before; what a LoRA's fusing has changed since then stays changed."""
        weights = weights_of(layers)
        fused = self._fused | _fused(layers)
        for name, before in self._before.items():
            weight = weights[name]
            data = before.to(weight.device, weight.dtype)
            if name in fused:
                data = data + (weight.data - self._given[name].to(weight.device, weight.dtype))
            weight.data = data


def _fused(layers: Layers) -> set[str]:
    """Names of the weights that a LoRA is fused into."""
    parts = {f"{name}.{part}": attn.get_submodule(part) for name, attn, _ in layers for part in PROJECTIONS}
    merged = [name for name, module in parts.items() if getattr(module, "merged", False)]
    return {f"{name}.{key}" for name in merged for key in ("weight", "bias")}


def _linear(attn: Any, part: str) -> Any:
    """A projection of a layer, under its LoRA wrapper if it has one."""
    module = attn.get_submodule(part)
    return getattr(module, "base_layer", module)
