"""One training step of DreamBooth (Ruiz et al. 2023, Eq. 2): readable beside the paper."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import mse_loss

from .data import Batch

TARGETS: dict[str, Callable[[Any, Tensor, Tensor, Tensor], Tensor]] = {
    "epsilon": lambda schedule, latents, noise, steps: noise,
    "v_prediction": lambda schedule, latents, noise, steps: schedule.get_velocity(latents, noise, steps),
    "sample": lambda schedule, latents, noise, steps: latents,
}
"""What a model of each prediction type is to predict: (schedule, latents, noise, timesteps) -> target."""


@contextmanager
def without_cudnn_attention() -> Iterator[None]:
    """Keep PyTorch from cuDNN's attention, its choice on an H100 and an H200.

    Its backward pass gives NaN there with torch 2.11 (pytorch/pytorch issue 196678).
    """
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def diffusion_loss(
    vae: Any,
    text_encoder: Any,
    unet: Any,
    schedule: Any,
    batch: Batch,
    prior_weight: float | None,
) -> Tensor:
    """Mean squared error of what the model predicts, and of the class images beside it.

    Args:
        vae, text_encoder, unet: the models; gradients flow where their parameters ask for them.
        schedule: the DDPMScheduler that the model was trained with.
        batch: images, tokens and the generator of all that is random here.
        prior_weight: weight of the second half of the batch, the class images; None if there are none.

    Returns:
        A scalar.
    """
    rng, device = batch.generator, vae.device
    with torch.no_grad():
        encoded = vae.encode(batch.pixels.to(device, vae.dtype)).latent_dist
        latents = encoded.sample(generator=rng).float() * vae.config.scaling_factor
    noise = torch.randn(latents.shape, generator=rng, device="cpu").to(device)
    last = schedule.config.num_train_timesteps
    steps = torch.randint(last, (len(latents),), generator=rng, device="cpu").to(device)
    noisy = schedule.add_noise(latents, noise, steps)

    text = text_encoder(batch.input_ids.to(device))[0]
    predicted = unet(noisy, steps, text).sample.float()
    target = TARGETS[schedule.config.prediction_type](schedule, latents, noise, steps)
    if prior_weight is None:
        return mse_loss(predicted, target)
    (own, prior), (own_target, prior_target) = predicted.chunk(2), target.chunk(2)
    return mse_loss(own, own_target) + prior_weight * mse_loss(prior, prior_target)
