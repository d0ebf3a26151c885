"""What the trainable modules share: the check of their inputs, and the convolution over the token grid."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def check_tokens(heads: int, head_dim: int, height: int, width: int, *tensors: Tensor) -> None:
    """Raise a ValueError unless each tensor is (B, heads, height * width, head_dim)."""
    for x in tensors:
        if x.ndim != 4 or x.shape[1:] != (heads, height * width, head_dim):
            raise ValueError(
                f"got {tuple(x.shape)}, need (B, heads={heads}, N={height * width}, head_dim={head_dim}) "
                f"for the {height} x {width} grid: pass the height and width of these tokens"
            )


def widen(x: Tensor) -> Tensor:
    """Half precision to float32; float32 and float64 as they are."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class GridConvolution(nn.Module):
    """Depthwise convolution over the token grid, DWC(V): a filter for each channel of each head."""

    def __init__(self, heads: int, head_dim: int, kernel_size: int) -> None:
        super().__init__()
        if kernel_size % 2 == 0:
            raise ValueError(f"kernel_size={kernel_size}: pass an odd one, which has a middle")
        self.heads = heads
        channels = heads * head_dim
        self.conv = nn.Conv2d(channels, channels, kernel_size, padding=kernel_size // 2, groups=channels)

    def reset(self, generator: torch.Generator | None = None) -> None:
        """Start as torch's convolutions do, from a generator or the global one."""
        bound = self.conv.weight[0].numel() ** -0.5
        for part in self.conv.parameters():
            nn.init.uniform_(part, -bound, bound, generator=generator)

    @torch.no_grad()
    def reset_to_scaling(self, k: float) -> None:
        """Make the convolution `k V`."""
        middle = self.conv.kernel_size[0] // 2
        self.conv.weight.zero_()
        self.conv.weight[:, :, middle, middle] = k
        if self.conv.bias is not None:
            self.conv.bias.zero_()

    def forward(self, value: Tensor, height: int, width: int) -> Tensor:
        """(B, heads, N, d) -> (B, heads, N, d), N = height * width, row by row."""
        grid = value.transpose(2, 3).flatten(1, 2).unflatten(2, (height, width))
        out: Tensor = self.conv(grid)
        return out.flatten(2).unflatten(1, (self.heads, -1)).transpose(2, 3)
