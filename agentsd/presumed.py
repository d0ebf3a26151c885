"""What a cached call takes for granted, and how each of these assumptions is checked.

| assumption | checked by |
|---|---|
| the latent is what the sampler made of the previous call | `Trail`: its values |
| all other arguments are unchanged | `conditions_of`: identity; `Trail`: values |
| weights, switches and modules are unchanged | `ModelState` |

If one of them doesn't hold, nothing stored is used and the call computes all layers. After three such steps
in a row, nothing more is skipped in the run (`agentsd.memory`).
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
_JUMP = 2.0  # ControlNet's residuals change by more than this factor when they are switched on or off


class ModelState:
    """The state of a model: weights, adapters with their scales, switches and modules.

    A write through `.data` leaves no trace, so it is noticed only in adapters (by `Trail`). Offloading moves
    weights between calls. Their addresses are compared only if nothing offloads.

    Args:
        unet: the model at the start of the run.

    Attributes:
        samples: the first number of each adapter weight.
    """

    def __init__(self, unet: Any) -> None:
        modules = list(unet.modules())
        self._unet = weakref.ref(unet)  # weak, as the U-Net's patch leads here
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
        """Return values that differ after a change, under names that a user understands."""
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
    """Round scales to six digits: diffusers multiplies and divides them in each call."""
    return {name: f"{one:.6g}" for name, one in value.items()} if isinstance(value, dict) else value


def _versions(weights: list[Tensor]) -> tuple[int, ...]:
    try:
        return tuple(one._version for one in weights)
    except RuntimeError:  # weights made in inference mode have no version
        return tuple(0 if one.is_inference() else one._version for one in weights)


def conditions_of(call: Call, model: ModelState) -> dict[str, Hashable]:
    """Return a call's conditions, all but latent and time, by name; equal in two calls if nothing changed.

    Arguments are compared by identity; no values are read. The residuals of ControlNet and T2I-Adapter
    follow from latent and time. Of them only the shapes are compared here, and the norms in `Trail`.
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
    """Checks by values that each call on a text follows from the one before.

    Whatever the sampler, prediction type and guidance, a step's latent is a linear combination of the
    previous latent and the outputs on it, plus a little: a multistep sampler's older outputs, a mask, a
    nudge. The latent of another image, or new noise, is not: a regression leaves all of its noise
    unexplained.

    On a CPU the values are at hand. On CUDA they would have to be waited for. So there they are copied
    without waiting, for full calls only, and read one call later. On other devices nothing is checked.

    Args:
        limits: for each call, the share of its latent that may be unexplained (`Sampler.new_noise`).
        samples: numbers from weights that may change in place.
    """

    def __init__(self, limits: Sequence[float], samples: list[Tensor]) -> None:
        self._limits, self._samples = limits, samples
        self._others: tuple[Numbers, Numbers] | None = None  # the last checked call's norms and values
        self._constant: Numbers | None = None  # which of these values hadn't changed in that call
        self._late: tuple[Tensor, Any, partial[str]] | None = None

    def broken(self, call: Call, before: tuple[Tensor, Tensor] | None, full: bool) -> str:
        """Return what no longer holds, in words; "" if all holds as far as is known.

        Args:
            call: the call to check.
            before: latent and output of the previous call.
            full: whether the call is planned to compute all layers.
        """
        device, late, self._late = call.latent.device.type, self._late, None
        if before is not None and (device == "cpu" or (device == "cuda" and full)):
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
        """Return what no longer held in a call, from its numbers."""
        if not np.isfinite(numbers).all():  # the image is lost anyway
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
    """Return the channel axis if a U-Net's input has more channels than its output."""
    sizes = zip(latent.shape, output.shape, strict=True)
    return next((axis for axis, (own, out) in enumerate(sizes) if own > out), None)


def _parts(latent: Tensor, output: Tensor) -> list[Tensor]:
    """Return the first channels of a U-Net's input, as many as its output has; if it has more, the last, too.

    One of the two is the latent. The other is a mask or an image and doesn't change. Marigold's comes first.
    """
    if (axis := _wider(latent, output)) is None:
        return [latent]
    own, out = latent.shape[axis], output.shape[axis]
    return [latent.narrow(axis, 0, out), latent.narrow(axis, own - out, out)]


def _gram(latent: Tensor, before: Tensor, output: Tensor) -> Tensor:
    """Return the inner products (B, R, R) of a latent, the previous one, and the outputs on it, by part.

    The outputs of the other passes of guidance count, too: the other halves or thirds of the batch.
    """
    batch = latent.shape[0]
    output = _parts(output, latent)[0]  # drops a learned variance
    shifts = {n * batch // parts for parts in (1, 2, 3) if batch % parts == 0 for n in range(parts)}
    outputs = [output, *(output.roll(shift, 0) for shift in sorted(shifts - {0}))]
    grams = []
    for own, other in zip(_parts(latent, output), _parts(before, output), strict=True):
        matrix = torch.stack([row.flatten(1).float() for row in (own, other, *outputs)], 1)
        grams.append(matrix @ matrix.mT)
    return torch.cat(grams) if grams[1:] else grams[0]


def _unexplained(gram: Numbers) -> float:
    """Return the share (RMS) of a latent that a regression on the others leaves; the batch's largest."""
    own, others, with_others = gram[:, 0, 0], gram[:, 1:, 1:], gram[:, 0, 1:]
    inverse = np.linalg.pinv(others, 1e-6, hermitian=True)
    explained = np.einsum("bi,bij,bj->b", with_others, inverse, with_others)
    left = np.maximum(own - explained, 0.0) / np.where(own > 0, own, 1.0)
    return float(np.sqrt(left.max()))


def _sizes(given: Mapping[str, Any]) -> Sequence[Tensor]:
    """Return the norm of each residual of a ControlNet or a T2I-Adapter."""
    residuals = [
        one for one in tree_leaves([given.get(name) for name in RESIDUALS]) if isinstance(one, Tensor)
    ]
    return torch._foreach_norm(residuals) if residuals else ()
