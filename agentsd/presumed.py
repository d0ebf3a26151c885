"""What a cached step presumes of its call, and how each presumption is looked at.

| it presumes that | it is looked at by |
|---|---|
| the latent is what the sampler made of the call before | `Trail`: its numbers |
| all else that the call is given is unchanged | `conditions_of`: identity; `Trail`: values |
| weights, switches and modules are the run's | `ModelState` |

Where one does not hold, nothing that was kept is used: the call computes all layers, and after three such
calls in a row nothing more is skipped in the run (`agentsd.hook`).
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module
from torch.utils._pytree import tree_leaves

from .hosts import RESIDUALS
from .plan import Call

Numbers = np.ndarray
_PLAIN = frozenset({bool, int, float, str, type(None)})
_JUMP = 2.0  # factor by which ControlNet's residuals change in a step where they come or go


class ModelState:
    """What a model computes with, but for its inputs: weights, adapters' scales, switches and modules.

    Weights that are written in place through `.data` leave no trace, but for adapters' (`Trail`). Offloading
    moves weights between calls, so their places count only where nothing offloads.

    Args:
        unet: the model, as it is when the run begins.

    Attributes:
        samples: the first number of each of the adapters' weights.
    """

    def __init__(self, unet: Any) -> None:
        modules = list(unet.modules())
        self._unet = weakref.ref(unet)  # which leads here by its patch
        self._parameters = [module._parameters for module in modules if module._parameters]
        self._children = [module._modules for module in modules if module._modules]
        self._switches = [vars(one) for one in modules if not type(one).__module__.startswith("torch.")]
        self._attention = [one for one in modules if hasattr(one, "processor")]
        self._adapted = [one for one in modules if one is not unet and hasattr(one, "active_adapters")]
        self._moves = any(hasattr(one, "_hf_hook") or hasattr(one, "_diffusers_hook") for one in modules)
        own = [getattr(one, name, None) for one in self._adapted for name in one.adapter_layer_names]
        weights = [weight for one in own if isinstance(one, Module) for weight in one.parameters()]
        self.samples = [] if self._moves else [weight.detach().flatten()[:1] for weight in weights]

    def read(self) -> dict[str, Hashable]:
        """What is another value after a change, by what a user calls it."""
        weights = [one for held in self._parameters for one in held.values() if one is not None]
        processors = [one.processor for one in self._attention]
        names = ("active_adapters", "disable_adapters", "merged_adapters", "scaling")
        adapters = [[_rounded(getattr(module, name, None)) for name in names] for module in self._adapted]
        scales = [getattr(one, "scale", None) for one in processors]
        loaded = list(getattr(self._unet(), "peft_config", ()))
        return {
            "the model's weights": (
                _versions(weights),
                () if self._moves else tuple(one.data_ptr() for one in weights),
            ),
            "adapters or their scales": str((adapters, scales, loaded)),
            "a switch of a module": tuple(
                value for held in self._switches for value in held.values() if type(value) in _PLAIN
            ),
            "the model's modules": tuple(
                map(id, [*processors, *(one for held in self._children for one in held.values())])
            ),
        }


def _rounded(value: Any) -> Any:
    """Scales to six digits: diffusers multiplies and divides them in each call."""
    return {name: f"{one:.6g}" for name, one in value.items()} if isinstance(value, dict) else value


def _versions(weights: list[Tensor]) -> tuple[int, ...]:
    try:
        return tuple(one._version for one in weights)
    except RuntimeError:  # those made in inference mode keep none
        return tuple(0 if one.is_inference() else one._version for one in weights)


def conditions_of(call: Call, model: ModelState) -> dict[str, Hashable]:
    """What a call is computed from but latent and time, by name; equal in two calls where it is unchanged.

    Arguments are told by identity, without a look at numbers. ControlNet's and T2I-Adapter's residuals follow
    from latent and time, so they count by their shapes here, and by their sizes in `Trail`.
    """
    sample = call.latent
    device, autocast = sample.device.type, None
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        autocast = torch.get_autocast_dtype(device)
    conditions: dict[str, Hashable] = {
        "shape or dtype": (tuple(sample.shape), sample.dtype, sample.device, autocast)
    }
    for name, value in call.inputs.items():
        if value is not sample and name != "timestep":
            conditions[name] = _identity(value, shape_alone=name in RESIDUALS)
    return conditions | model.read()


def _identity(value: Any, shape_alone: bool) -> Hashable:
    if isinstance(value, Tensor):
        if shape_alone:
            return tuple(value.shape)
        version = 0 if value.is_inference() else value._version
        return value.data_ptr(), tuple(value.shape), value.stride(), version
    if isinstance(value, Mapping):
        return tuple((key, _identity(one, shape_alone)) for key, one in value.items())
    if isinstance(value, list | tuple):
        return tuple(_identity(one, shape_alone) for one in value)
    return (type(value), value) if type(value) in _PLAIN else id(value)


class Trail:
    """Whether the calls on one text follow from each other, by the numbers of their inputs and outputs.

    Whatever the sampler, the prediction type and the guidance, a step's latent is a sum of the latent before
    and of the outputs on it, and of little else: a multistep sampler's older outputs, a mask, a nudge. One of
    another image or of new noise is not: what is left of it after a regression is all of its noise.

    A CPU has these numbers at once. CUDA gets to them while the next call is put in its queue, so those of
    computed calls are read one call later and it never waits. On other devices nothing is looked at.

    Args:
        limits: for each call the share of its latent that may be unexplained (`Sampler.new_noise`).
        samples: of weights that may change in place.
    """

    def __init__(self, limits: Sequence[float], samples: list[Tensor]) -> None:
        self._limits, self._samples = limits, samples
        self._others: tuple[Numbers, Numbers] | None = None  # of the last call that was read
        self._constant: Numbers | None = None  # which of these were as before in it
        self._late: tuple[Tensor, Any, partial[str]] | None = None

    def broken(self, call: Call, before: tuple[Tensor, Tensor] | None, computed: bool) -> str:
        """What no longer holds in a call, in words; nothing where all does, so far as is known.

        Args:
            call: the next.
            before: latent and output of the call before.
            computed: it is planned to compute all layers.
        """
        device, late, self._late = call.latent.device.type, self._late, None
        if before is not None and (device == "cpu" or (device == "cuda" and computed)):
            gram, sizes = _gram(call.latent, *before), _sizes(call.inputs)
            values = self._values(call.latent, before[1])
            numbers = torch.cat([part.flatten().float() for part in (gram, *sizes, *values)])
            read = partial(self._read, call.index, gram.shape, len(sizes))
            if device == "cpu":
                return read(numbers.numpy())
            event = torch.cuda.Event()
            self._late = numbers.to("cpu", non_blocking=True), event, read
            event.record()
        if late is None:
            return ""
        late[1].synchronize()
        return late[2](late[0].numpy())

    def _values(self, latent: Tensor, output: Tensor) -> list[Tensor]:
        """Of what may stay as it is within a run: each channel, where some are no latent's, and weights."""
        numbers = [weight.to(latent.device) for weight in self._samples]
        if (axis := _wider(latent, output)) is not None:
            channels = latent.movedim(axis, 0).flatten(1)
            numbers += [channels.mean(1), channels.square().mean(1)]
        return numbers

    def _read(self, call: int, shape: torch.Size, sizes: int, numbers: Numbers) -> str:
        """What no longer held in a call of which all numbers are known."""
        if not np.isfinite(numbers).all():  # nothing can be told of an image that is lost
            return ""
        gram, norms, values = np.split(numbers.astype(np.float64), [shape.numel(), shape.numel() + sizes])
        before, self._others = self._others, (norms, values)
        if _unexplained(gram.reshape(shape)) > self._limits[call]:
            return "the latent is not what the sampler makes of the call before (another, new noise, a roll)"
        if before is None or [one.shape for one in before] != [norms.shape, values.shape]:
            return ""
        if (np.maximum(before[0], norms) > _JUMP * np.minimum(before[0], norms)).any():
            return "the residuals of a ControlNet or an adapter come or go"
        were, self._constant = self._constant, np.isclose(values, before[1], rtol=1e-5, atol=0)
        if were is not None and (were & ~self._constant).any():
            return "the channels beside the latent's or an adapter's weights changed"
        return ""


def _wider(latent: Tensor, output: Tensor) -> int | None:
    """The axis of channels, where a U-Net's input has more of them than its output."""
    sizes = zip(latent.shape, output.shape, strict=True)
    return next((axis for axis, (own, out) in enumerate(sizes) if own > out), None)


def _parts(latent: Tensor, output: Tensor) -> list[Tensor]:
    """As many of a U-Net's channels as its output has: the first ones, and the last where it has more.

    The latent is one of these, and the other stays as it is (a mask, an image; Marigold's comes first).
    """
    if (axis := _wider(latent, output)) is None:
        return [latent]
    own, out = latent.shape[axis], output.shape[axis]
    return [latent.narrow(axis, 0, out), latent.narrow(axis, own - out, out)]


def _gram(latent: Tensor, before: Tensor, output: Tensor) -> Tensor:
    """(B, R, R) products of a latent, the one before, and the outputs on it; for each of its parts.

    Of the outputs those of the other passes of guidance, too: the batch's halves and thirds.
    """
    batch = latent.shape[0]
    output = _parts(output, latent)[0]  # without a learned variance
    shifts = {n * batch // parts for parts in (1, 2, 3) if batch % parts == 0 for n in range(parts)}
    outputs = [output, *(output.roll(shift, 0) for shift in sorted(shifts - {0}))]
    grams = []
    for own, other in zip(_parts(latent, output), _parts(before, output), strict=True):
        matrix = torch.stack([row.flatten(1).float() for row in (own, other, *outputs)], 1)
        grams.append(matrix @ matrix.mT)
    return torch.cat(grams) if grams[1:] else grams[0]


def _unexplained(gram: Numbers) -> float:
    """The share (a root mean square) of a latent that is no sum of the others; of the image with most."""
    own, others, with_others = gram[:, 0, 0], gram[:, 1:, 1:], gram[:, 0, 1:]
    inverse = np.linalg.pinv(others, 1e-6, hermitian=True)
    explained = np.einsum("bi,bij,bj->b", with_others, inverse, with_others)
    left = np.maximum(own - explained, 0.0) / np.where(own > 0, own, 1.0)
    return float(np.sqrt(left.max()))


def _sizes(given: Mapping[str, Any]) -> Sequence[Tensor]:
    """The norm of each residual of a ControlNet or a T2I-Adapter."""
    residuals = [
        one for one in tree_leaves([given.get(name) for name in RESIDUALS]) if isinstance(one, Tensor)
    ]
    return torch._foreach_norm(residuals) if residuals else ()
