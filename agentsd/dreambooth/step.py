"""One training step of DreamBooth (Ruiz et al. 2023, Eq. 2): readable beside the paper."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from diffusers.training_utils import compute_snr
from torch import Tensor

TARGETS: dict[str, Callable[[Any, Tensor, Tensor, Tensor], Tensor]] = {
    "epsilon": lambda schedule, latents, noise, steps: noise,
    "v_prediction": lambda schedule, latents, noise, steps: schedule.get_velocity(latents, noise, steps),
    "sample": lambda schedule, latents, noise, steps: latents,
}
"""What a model of each prediction type is to predict: (schedule, latents, noise, timesteps) -> target."""

_TO_NOISE: dict[str, Callable[[Tensor], Tensor]] = {
    "epsilon": lambda snr: 1 / snr,
    "v_prediction": lambda snr: 1 / (snr + 1),
    "sample": torch.ones_like,
}
"""What an error of each prediction type is to be multiplied by, to count as one of the latents."""


def diffusion_loss(
    unet: Any,
    schedule: Any,
    latents: Tensor,
    text: Tensor,
    rng: torch.Generator,
    *,
    prior_weight: float | None = None,
    snr_gamma: float | None = None,
    offset_noise: bool = False,
) -> Tensor:
    """Mean squared error of what the model predicts, and of the class images beside it.

    Args:
        unet: the model.
        schedule: the DDPMScheduler that it was trained with.
        latents: (B, C, h, w), scaled as the model takes them.
        text: (B, L, D), embeddings of the prompts.
        rng: of noise and timesteps, on the CPU.
        prior_weight: weight of the second half of the batch, the class images; None if there are none.
        snr_gamma: of Min-SNR weights; None weighs all timesteps alike.
        offset_noise: whether a tenth of one normal number a channel is added to the noise.

    Returns:
        A scalar.
    """
    kind, device = schedule.config.prediction_type, latents.device

    def normal(shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=rng, device="cpu").to(device)

    noise = normal(latents.shape)
    last = schedule.config.num_train_timesteps
    steps = torch.randint(last, (len(latents),), generator=rng, device="cpu").to(device)
    if offset_noise:
        noise = noise + 0.1 * normal((*latents.shape[:2], 1, 1))
    noisy = schedule.add_noise(latents, noise, steps)

    predicted = unet(noisy, steps, text).sample.float()
    losses = (predicted - TARGETS[kind](schedule, latents, noise, steps)).square().mean((1, 2, 3))
    if snr_gamma is not None:
        snr = compute_snr(schedule, steps)
        losses = losses * snr.clamp(max=snr_gamma) * _TO_NOISE[kind](snr)
    if prior_weight is None:
        return losses.mean()
    own, prior = losses.chunk(2)
    return own.mean() + prior_weight * prior.mean()
