"""The last stage: guidance at 7.5 gets to do what it did best at a lower scale.

A small model that has learnt its captions by heart is so sure of them that the usual guidance scale
overshoots. Its conditional prediction is moved towards the unconditional one, so that a scale w does what
w / strength did before: a distillation (Meng et al. 2023, "On Distillation of Guided
Diffusion Models").
"""

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .config import GuidanceConfig
from .diffusion import DiffusionLoss
from .loop import train_loop


class GuidanceLoss(nn.Module):
    """Squared error to `u + (c - u) / strength` of the model as it was, and to `u` without a caption."""

    def __init__(self, before: DiffusionLoss, strength: float) -> None:
        super().__init__()
        self.unet, self.text_encoder = before.unet, before.text_encoder
        self._strength = strength
        self._noise = before.noise
        # Not modules of this one, so that they are neither trained nor saved.
        self._teacher = (copy.deepcopy(before.unet), copy.deepcopy(before.text_encoder))

    def forward(self, latents: Tensor, noise: Tensor, t: Tensor, ids: Tensor, empty: Tensor) -> Tensor:
        """Return the mean loss of latents (B, 4, h, w) at timesteps (B,) under token ids (B, L)."""
        noisy = self._noise.add_noise(latents, noise, t)
        unet, text_encoder = self._teacher
        with torch.no_grad():
            text = text_encoder(torch.cat([ids, empty.expand_as(ids)]))[0]
            said, unsaid = unet(noisy.repeat(2, 1, 1, 1), t.repeat(2), text).sample.float().chunk(2)
        predicted = self.unet(noisy, t, self.text_encoder(ids)[0]).sample.float()
        # Without a caption both predictions are one, and so is the target.
        return (predicted - unsaid - (said - unsaid) / self._strength).square().mean()


def soften_guidance(
    before: DiffusionLoss,
    latents: Tensor,
    ids: Tensor,
    empty: Tensor,
    config: GuidanceConfig,
    folder: Path,
    *,
    seed: int,
    device: torch.device,
) -> None:
    """Train on scaled latents (N, 4, h, w) and token ids (N, L), each of them with any other.

    `empty` (1, L) are the ids of the empty prompt. The averaged weights are left in `before`.
    """
    loss: Any = GuidanceLoss(before, config.strength).to(device)
    latents, ids, empty = latents.to(device), ids.to(device), empty.to(device)
    steps = torch.arange(config.batch) / config.batch

    def loss_at(generator: torch.Generator) -> Tensor:
        picture, caption = torch.randint(len(ids), (2, config.batch), generator=generator)
        own = torch.rand(config.batch, generator=generator) < 0.5
        caption = torch.where(own, picture, caption)
        noise = torch.randn(latents[picture].shape, generator=generator).to(device)
        spread = (steps + torch.rand(config.batch, generator=generator) / config.batch) * 1000
        dropped = torch.rand(config.batch, 1, generator=generator) < config.caption_dropout
        prompt = torch.where(dropped.to(device), empty, ids[caption])
        return loss(latents[picture], noise, spread.long().to(device), prompt, empty)

    train_loop(loss, loss_at, config, folder, seed=seed, device=device)
