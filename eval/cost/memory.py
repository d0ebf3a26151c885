"""Memory as the paper counts it: what a batch of one more image adds to the peak."""

from collections.abc import Callable
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
        return max(self.denoising[0], self.decoding[0]), max(self.denoising[1], self.decoding[1])

    def needed(self, batch: int) -> float:
        """Return the peak, in GB, to be expected of a batch."""
        return max(peaks[0] + (batch - 1) * growth(peaks) for peaks in (self.denoising, self.decoding))


def growth(peaks: tuple[float, float]) -> float:
    """Return what one more image adds (Table 10's GB/img)."""
    return peaks[1] - peaks[0]


def pipeline_memory(pipe: Any, call: Callable[[int], object]) -> PipelineMemory | None:
    """Return the peaks of a pipeline's run; `call(n)` makes n images. On a CPU there are none: None.

    Raises torch.OutOfMemoryError where the GPU has too little.
    """
    device, decode = pipe._execution_device, pipe.vae.decode
    if device.type != "cuda":
        return None
    peaks: dict[int, list[float]] = {1: [], 2: []}

    def decode_apart(*args: Any, **kwargs: Any) -> Any:
        peaks[count].append(_peak(device))
        _reset(device)
        return decode(*args, **kwargs)

    with patch.object(pipe.vae, "decode", decode_apart):
        for count, found in peaks.items():
            _reset(device)
            call(count)
            found.append(_peak(device))
    (one, one_decoded), (two, two_decoded) = peaks.values()
    return PipelineMemory((one, two), (one_decoded, two_decoded))


def memory_per_image(
    call: Callable[[int], object], batch: int, device: torch.device, warm: bool = False
) -> float | None:
    """Return the growth of peak GPU memory, in GB (1e9 bytes), when a batch grows by 1; None on a CPU.

    `call(n)` runs a batch of n; `warm` says that its first call compiles, which is not an image's.
    """
    if device.type != "cuda":
        return None
    peaks = []
    for count in (batch, batch + 1):
        if warm:
            call(count)
        _reset(device)
        call(count)
        peaks.append(_peak(device))
    return growth((peaks[0], peaks[1]))


def _reset(device: torch.device) -> None:
    torch.cuda.empty_cache()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)


def _peak(device: torch.device) -> float:
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) / 1e9
