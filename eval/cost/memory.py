"""Memory as the paper counts it: what a batch of one more image adds to the peak."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch


@dataclass(frozen=True)
class PipelineMemory:
    """The peaks of GPU memory, in GB (1e9 bytes), of a run of one image and of two."""

    denoising: tuple[float, float]
    """Up to the decoder's call: text encoder and all steps."""
    decoding: tuple[float, float]

    @property
    def total(self) -> tuple[float, float]:
        """The peaks of the whole run."""
        one, two = (max(pair) for pair in zip(self.denoising, self.decoding, strict=True))
        return one, two

    def needed(self, batch: int) -> float:
        """Return the peak, in GB, to be expected of a batch."""
        return max(one + (batch - 1) * growth((one, two)) for one, two in (self.denoising, self.decoding))


def growth(peaks: tuple[float, float]) -> float:
    """Return what one more image adds (Table 10's GB/img)."""
    return peaks[1] - peaks[0]


def pipeline_memory(pipe: Any, call: Callable[[int], object]) -> PipelineMemory | None:
    """Return the peaks of a pipeline's run; `call(n)` makes n images. On a CPU there are none: None.

    Raises torch.OutOfMemoryError where the GPU has too little.
    """
    device = pipe.unet.device
    if device.type != "cuda":
        return None
    denoising, decoding = [], []
    for count in (1, 2):
        torch.cuda.empty_cache()
        _reset(device)
        with _decoder_apart(pipe, device) as before:
            call(count)
            after = _peak(device)
        denoising.append(max(before, default=after))
        decoding.append(after)
    return PipelineMemory((denoising[0], denoising[1]), (decoding[0], decoding[1]))


@contextmanager
def _decoder_apart(pipe: Any, device: torch.device) -> Iterator[list[float]]:
    """Begin a new peak at each call of the decoder; yields a list of the peaks before."""
    before: list[float] = []
    decode = pipe.vae.decode

    def apart(*args: Any, **kwargs: Any) -> Any:
        before.append(_peak(device))
        _reset(device)
        return decode(*args, **kwargs)

    with patch.object(pipe.vae, "decode", apart):
        yield before


def memory_per_image(call: Callable[[int], object], batch: int, device: torch.device) -> float | None:
    """Return the growth of peak GPU memory, in GB (1e9 bytes), when a batch grows by 1; None on a CPU.

    `call(n)` runs a batch of n.
    """
    if device.type != "cuda":
        return None
    peaks = []
    for count in (batch, batch + 1):
        torch.cuda.empty_cache()
        _reset(device)
        call(count)
        peaks.append(_peak(device))
    return growth((peaks[0], peaks[1]))


def _reset(device: torch.device) -> None:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)


def _peak(device: torch.device) -> float:
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) / 1e9
