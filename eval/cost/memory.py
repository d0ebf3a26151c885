"""Memory as the paper counts it."""

from collections.abc import Callable

import torch


def memory_per_image(call: Callable[[int], object], batch: int, device: torch.device) -> float | None:
    """Return the growth of peak GPU memory, in GB (1e9 bytes), when the batch grows by 1 (Table 10's GB/img).

    `call(n)` runs a batch of n. On a CPU there is no such figure: None.
    """
    if device.type != "cuda":
        return None
    peaks = []
    for count in (batch, batch + 1):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        call(count)
        torch.cuda.synchronize(device)
        peaks.append(torch.cuda.max_memory_allocated(device))
    return (peaks[1] - peaks[0]) / 1e9
