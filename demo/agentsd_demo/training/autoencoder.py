"""The autoencoder: pixels to a latent of 4 channels at a quarter of the size, and back."""

import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL
from PIL import Image
from torch import Tensor, nn

from ..data import SIZE
from ..scenes import SIZES, Triple, random_scene
from .config import AutoencoderConfig
from .loop import compile_loss, size_at, train_loop


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


def factor_of(autoencoder: Any) -> int:
    """Return how many pixels on a side a latent's value stands for."""
    factor: int = 2 ** (len(autoencoder.config.block_out_channels) - 1)
    return factor


def inherit_weights(autoencoder: Any, teacher: Any) -> None:
    """Copy a teacher's weights where the shapes fit, and the scale of its latents.

    A level is matched by its distance from the latent.
    """
    levels = len(autoencoder.config.block_out_channels) - len(teacher.config.block_out_channels)
    weights = autoencoder.state_dict()
    for name, weight in teacher.state_dict().items():
        name = re.sub(r"(down_blocks)\.(\d+)", lambda found: f"{found[1]}.{int(found[2]) + levels}", name)
        if name in weights and weights[name].shape == weight.shape:
            weights[name] = weight
    autoencoder.load_state_dict(weights)
    autoencoder.register_to_config(scaling_factor=teacher.config.scaling_factor)


class AutoencoderLoss(nn.Module):
    """Squared and absolute error, KL divergence and distance to a teacher's latents.

    A module, so that it is compiled as a whole.
    """

    def __init__(self, autoencoder: Any, config: AutoencoderConfig, teacher: Any = None) -> None:
        super().__init__()
        self.autoencoder = autoencoder
        self.config = config
        self.teacher = teacher
        self.ratio = factor_of(autoencoder) // factor_of(teacher) if teacher is not None else 1

    def forward(self, pixels: Tensor, noise: Tensor) -> Tensor:
        """Return the loss of images (B, 3, H, W), their latents drawn with noise (B, 4, h, w)."""
        posterior = self.autoencoder.encode(pixels).latent_dist
        decoded = self.autoencoder.decode(posterior.mean + posterior.std * noise).sample
        error = (decoded - pixels).float()
        loss = error.square().mean() + self.config.l1_weight * error.abs().mean()
        loss += self.config.kl_weight * posterior.kl().mean() / noise[0].numel()
        if self.teacher is not None:
            with torch.no_grad():
                taught = self.teacher.encode(F.avg_pool2d(pixels, self.ratio)).latent_dist.mean
            loss += self.config.latent_weight * (posterior.mean - taught).float().square().mean()
        return loss


def draw_crops(
    seed: str, count: int, size: int, trained: Sequence[Triple], rare: Sequence[Triple], share: float
) -> Tensor:
    """Return crops (N, 3, size, size) of random scenes of every canvas, a share of them of rare triples."""
    crops = []
    for i in range(count):
        draw = random.Random(f"{seed}/{i}/crop").random
        canvas = SIZES[int(draw() * len(SIZES))]
        scene = random_scene(f"{seed}/{i}", canvas, among=rare if draw() < share else trained)
        left, top = (int(draw() * (canvas - size + 1)) for _ in range(2))
        crops.append(scene.image.crop((left, top, left + size, top + size)))
    return to_pixels(crops)


def train_autoencoder(
    autoencoder: Any,
    teacher: Any,
    trained: Sequence[Triple],
    rare: Sequence[Triple],
    config: AutoencoderConfig,
    folder: Path,
    *,
    seed: int,
    device: torch.device,
) -> None:
    """Train on scenes without end, then normalise the latents, if they aren't a teacher's."""
    loss = AutoencoderLoss(autoencoder, config, teacher).to(device)
    if config.compile:
        compile_loss(loss)

    def loss_at(generator: torch.Generator, step: int) -> Tensor:
        size = size_at(config.stages, step / config.steps, f"crop/{seed}/{step}")
        name = f"autoencoder/{seed}/{step}"
        pixels = draw_crops(name, config.batch, size, trained, rare, config.rare).to(device)
        side = size // factor_of(autoencoder)
        noise = torch.randn((config.batch, 4, side, side), generator=generator)
        return loss(pixels, noise.to(device))

    train_loop(autoencoder, loss_at, config, folder, seed=seed, device=device)
    if teacher is None:
        pixels = draw_crops(f"normalise/{seed}", 256, SIZE, trained, rare, config.rare)
        normalise_latents(autoencoder, pixels.to(device))


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
