"""The autoencoder: pixels to a latent of 4 channels at half the size, and back."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL
from PIL import Image
from torch import Tensor, nn

from ..data import SIZE
from .config import AutoencoderConfig
from .loop import compile_loss, train_loop


def to_pixels(images: list[Image.Image]) -> Tensor:
    """Return RGB images as a float tensor (N, 3, H, W) in [-1, 1]."""
    pixels = torch.from_numpy(np.stack([np.asarray(image) for image in images]))
    return pixels.permute(0, 3, 1, 2).float() / 127.5 - 1


def build_autoencoder(config: AutoencoderConfig) -> Any:
    """Return an untrained AutoencoderKL."""
    autoencoder: Any = AutoencoderKL(
        block_out_channels=config.channels,
        down_block_types=("DownEncoderBlock2D",) * len(config.channels),
        up_block_types=("UpDecoderBlock2D",) * len(config.channels),
        layers_per_block=config.layers,
        norm_num_groups=8,
        sample_size=SIZE,
        mid_block_add_attention=False,
    )
    with torch.no_grad():  # a posterior of variance 1 would drown the untrained encoder's small means
        autoencoder.quant_conv.bias[4:] = -6.0
    return autoencoder


def latent_shape(autoencoder: Any, pixels: Tensor) -> tuple[int, int, int]:
    """Return the shape (channels, h, w) of the latents of images (N, 3, H, W)."""
    scale = 2 ** (len(autoencoder.config.block_out_channels) - 1)
    return autoencoder.config.latent_channels, pixels.shape[2] // scale, pixels.shape[3] // scale


class AutoencoderLoss(nn.Module):
    """Squared and absolute error and KL divergence; a module, so that it is compiled as a whole."""

    def __init__(self, autoencoder: Any, config: AutoencoderConfig) -> None:
        super().__init__()
        self.autoencoder = autoencoder
        self.config = config

    def forward(self, pixels: Tensor, noise: Tensor) -> Tensor:
        """Return the loss of images (B, 3, H, W), their latents drawn with noise (B, 4, h, w)."""
        posterior = self.autoencoder.encode(pixels).latent_dist
        decoded = self.autoencoder.decode(posterior.mean + posterior.std * noise).sample
        error = (decoded - pixels).float()
        kl = posterior.kl().mean() / noise[0].numel()
        return error.square().mean() + self.config.l1_weight * error.abs().mean() + self.config.kl_weight * kl


def train_autoencoder(
    autoencoder: Any,
    draw: Callable[[str, int], list[Image.Image]],
    config: AutoencoderConfig,
    folder: Path,
    *,
    seed: int,
    device: torch.device,
) -> None:
    """Train on images without end, then normalise the latents.

    `draw` returns as many images as it is asked for, of a seed.
    """
    loss = AutoencoderLoss(autoencoder, config).to(device)
    if config.compile:
        compile_loss(loss)

    def loss_at(generator: torch.Generator, step: int) -> Tensor:
        pixels = to_pixels(draw(f"autoencoder/{seed}/{step}", config.batch)).to(device)
        noise = torch.randn((config.batch, *latent_shape(autoencoder, pixels)), generator=generator)
        return loss(pixels, noise.to(device))

    train_loop(autoencoder, loss_at, config, folder, seed=seed, device=device)
    normalise_latents(autoencoder, to_pixels(draw(f"normalise/{seed}", 256)).to(device))


@torch.no_grad()
def encode(autoencoder: Any, pixels: Tensor) -> Tensor:
    """Return the latents' means (N, 4, h, w), unscaled."""
    return torch.cat([autoencoder.encode(part).latent_dist.mean for part in pixels.split(64)])


@torch.no_grad()
def decode(autoencoder: Any, latents: Tensor) -> Tensor:
    """Return images (N, 3, H, W) in [-1, 1] of unscaled latents."""
    return torch.cat([autoencoder.decode(part).sample for part in latents.split(64)]).clamp(-1, 1)


@torch.no_grad()
def normalise_latents(autoencoder: Any, pixels: Tensor) -> None:
    """Give the latents of `pixels` mean 0 and variance 1 in each channel, without changing any image.

    A pipeline's scaling factor can't shift, and a mean left in (white surroundings) leaks through the last
    step of SD's noise schedule. So both go into the 1x1 convolutions on either side of the latent.
    """
    latents = encode(autoencoder, pixels)
    mean, std = latents.mean((0, 2, 3)), latents.std((0, 2, 3))
    before, after = autoencoder.quant_conv, autoencoder.post_quant_conv
    channels = len(mean)
    before.weight[:channels] /= std[:, None, None, None]
    before.bias[:channels] = (before.bias[:channels] - mean) / std
    before.bias[channels:] -= 2 * std.log()  # the log-variances
    after.bias += after.weight[:, :, 0, 0] @ mean
    after.weight *= std[None, :, None, None]
    scale = (1 / encode(autoencoder, pixels).std()).item()
    autoencoder.register_to_config(scaling_factor=round(scale, 5))


def psnr(autoencoder: Any, pixels: Tensor) -> float:
    """Return the mean over images of the reconstruction's peak signal-to-noise ratio, in dB."""
    error = decode(autoencoder, encode(autoencoder, pixels)) - pixels
    mse = F.mse_loss(error, torch.zeros_like(error), reduction="none").mean((1, 2, 3)) / 4
    return (-10 * mse.log10()).mean().item()
