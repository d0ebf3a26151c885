"""What a cached step presumes of its call, and how each presumption is looked at.

| it presumes that | it is looked at |
|---|---|
| the latent is what the sampler made of the call before | `Trail`: a regression on that call's latent and outputs |
| all else that the call is given is what the call before was given | `conditions_of` by identity, `Trail` by value |
| weights, switches and modules are the run's | `ModelState` |

Where one does not hold, nothing that was kept is used: the call computes all layers, and after three such calls in
a row nothing more is skipped in the run (`agentsd.hook`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module
from torch.utils._pytree import tree_leaves

from .hosts import RESIDUALS
from .plan import Call
from .sampler import Sampler

Numbers = np.ndarray
_PLAIN = (bool, int, float, str, type(None))
_NEW_NOISE = 0.9
"""Share of a latent's noise that is unexplained by the call before it where the latent is another's: all of it. An
ancestral sampler that lowers the noise level by 40% in a step renews 0.8 of it."""
_LEAST_FALL = 0.6  # of the noise level in a step, below which ancestral noise looks like another latent's
_LEAST_SHARE = 0.1  # of noise in a latent: below it a nudge is as large
_JUMP = 2.0  # factor by which ControlNet's residuals change in a step where they come or go


def conditions_of(given: Mapping[str, Any], latent: str) -> dict[str, Hashable]:
    """What a call is given but latent and time, by name: equal in two calls if it is the same and unchanged.

    It is told by identity, without a look at numbers. ControlNet's and T2I-Adapter's residuals follow from latent and
    time, so they count by their shapes here, and by their sizes in `Trail`.
    """
    sample = given[latent]
    device, autocast = sample.device.type, None
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        autocast = torch.get_autocast_dtype(device)
    conditions: dict[str, Hashable] = {
        "shape or dtype": (tuple(sample.shape), sample.dtype, sample.device, autocast)
    }
    for name, value in given.items():
        if name not in (latent, "timestep"):
            conditions[name] = _identity(value, shape_alone=name in RESIDUALS)
    return conditions


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
    return (type(value), value) if isinstance(value, _PLAIN) else id(value)


class ModelState:
    """What a model computes with, but for its inputs: weights, adapters' scales, switches and modules.

    Weights that are written in place through `.data` leave no trace, but for adapters' (`Trail`). Offloading moves
    weights between calls, so their places count only where nothing offloads.

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
        adapters = [[getattr(module, name, None) for name in names] for module in self._adapted]
        scales = [getattr(one, "scale", None) for one in processors]
        loaded = list(getattr(self._unet(), "peft_config", ()))
        return {
            "the model's weights": (
                tuple(0 if one.is_inference() else one._version for one in weights),
                () if self._moves else tuple(one.data_ptr() for one in weights),
            ),
            "adapters or their scales": str((adapters, scales, loaded)),
            "a switch of a module": tuple(
                value for held in self._switches for value in held.values() if isinstance(value, _PLAIN)
            ),
            "the model's modules": tuple(
                map(id, [*processors, *(one for held in self._children for one in held.values())])
            ),
        }


class Trail:
    """Whether the calls on one text follow from each other, by the numbers of their inputs and outputs.

    Whatever the sampler, the prediction type and the guidance, a step's latent is a sum of the latent before and of
    the outputs on it, and of little else: a multistep sampler's older outputs, a mask, a nudge. A latent of another
    image or of new noise is not: what is left of it after a regression is all of its noise.

    A CPU has these numbers at once. CUDA gets to them while the next call is put in its queue, so they are read one
    call later and it never waits. On other devices nothing is looked at.

    Args:
        sampler: of the run.
        samples: of weights that may change in place.
    """

    def __init__(self, sampler: Sampler, samples: list[Tensor]) -> None:
        self._sampler, self._samples = sampler, samples
        self._before: tuple[Tensor, Tensor] | None = None  # the latent and the output of the last call
        self._sizes: Numbers | None = None
        self._given: Numbers | None = None
        self._late: tuple[Tensor, Any, Callable[[Numbers], str]] | None = None

    def note(self, call: Call, output: Tensor) -> None:
        """Take in what a call gave."""
        self._before = call.latent.detach().clone(), output.detach().clone()

    def broken(self, call: Call) -> str:
        """What no longer holds in a call, in words; nothing where all does, so far as is known."""
        device = call.latent.device
        if device.type not in ("cpu", "cuda") or self._before is None:
            return ""
        parts = [_gram(call.latent, *self._before), _sizes(call.inputs), self._values(call)]
        read = partial(self._read, call.index, [part.shape for part in parts])
        numbers = torch.cat([part.flatten() for part in parts])
        if device.type == "cpu":
            return read(numbers.numpy())
        event = torch.cuda.Event()
        late, self._late = self._late, (numbers.to("cpu", non_blocking=True), event, read)
        event.record()
        if late is None:
            return ""
        late[1].synchronize()
        return late[2](late[0].numpy())

    def _values(self, call: Call) -> Tensor:
        """What stays as it is within a run: channels beside the latent's (a mask, a masked image), weights."""
        assert self._before is not None
        _, beside = _split(call.latent, self._before[1])
        numbers = [] if beside is None else [beside.mean(), beside.square().mean()]
        sampled = [weight.to(call.latent.device) for weight in self._samples]
        return torch.cat([one.flatten().float() for one in (call.latent.new_zeros(0), *numbers, *sampled)])

    def _read(self, call: int, shapes: list[torch.Size], numbers: Numbers) -> str:
        """The same of a call of which all numbers are known by now."""
        ends = np.cumsum([shape.numel() for shape in shapes])[:-1]
        gram, sizes, given = np.split(numbers.astype(np.float64), ends)
        (before, self._sizes), (given_before, self._given) = (self._sizes, sizes), (self._given, given)
        unexplained = _unexplained(gram.reshape(shapes[0]))
        share = max(self._sampler.noise_share(call), _LEAST_SHARE)
        if unexplained > _NEW_NOISE * share and self._sampler.noise_falls(call) > _LEAST_FALL:
            return "the latent is not what the sampler makes of the call before (another image, new noise, a roll)"
        if before is not None and before.shape == sizes.shape and _jumped(before, sizes):
            return "the residuals of a ControlNet or an adapter come or go"
        if given_before is not None and given_before.shape == given.shape:
            if not np.allclose(given, given_before, rtol=1e-5, atol=0):
                return "the channels beside the latent's or an adapter's weights changed"
        return ""


def _split(latent: Tensor, output: Tensor) -> tuple[Tensor, Tensor | None]:
    """The channels of a U-Net's input that its output has, too, and those beside them (None where there are none)."""
    axes = [axis for axis, (own, out) in enumerate(zip(latent.shape, output.shape, strict=True)) if own > out]
    if not axes:
        return latent, None
    count = output.shape[axes[0]]
    return latent.narrow(axes[0], 0, count), latent.narrow(axes[0], count, latent.shape[axes[0]] - count)


def _gram(latent: Tensor, before: Tensor, output: Tensor) -> Tensor:
    """(B, R, R) products of a latent, the one before, and the outputs on it.

    Of the outputs those of the other passes of guidance, too: the batch's halves and thirds.
    """
    batch = latent.shape[0]
    shifts = {n * batch // parts for parts in (1, 2, 3) if batch % parts == 0 for n in range(parts)}
    outputs = [output.roll(shift, 0) for shift in sorted(shifts)]
    rows = [_split(latent, output)[0], _split(before, output)[0], *outputs]
    matrix = torch.stack([row.flatten(1).float() for row in rows], 1)
    return matrix @ matrix.mT


def _unexplained(gram: Numbers) -> float:
    """The share (a root mean square) of each latent that is no sum of the others, of the image that has most."""
    own, others, with_others = gram[:, 0, 0], gram[:, 1:, 1:], gram[:, 0, 1:]
    explained = np.einsum("bi,bij,bj->b", with_others, np.linalg.pinv(others, 1e-6, hermitian=True), with_others)
    left = np.maximum(own - explained, 0.0) / np.where(own > 0, own, 1.0)
    return float(np.sqrt(left.max()))


def _sizes(given: Mapping[str, Any]) -> Tensor:
    """The norm of each residual of a ControlNet or a T2I-Adapter."""
    held = [given.get(name) for name in RESIDUALS]
    residuals = [one for one in tree_leaves(held) if isinstance(one, Tensor)]
    return torch.stack(torch._foreach_norm(residuals)).float() if residuals else given["sample"].new_zeros(0)


def _jumped(before: Numbers, sizes: Numbers) -> bool:
    return bool((np.maximum(before, sizes) > _JUMP * np.minimum(before, sizes)).any())
