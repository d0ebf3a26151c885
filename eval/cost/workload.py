"""What is timed: a U-Net call in a phase, a training step, or a whole pipeline call, on random inputs."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..settings import LatencySettings
from .architectures import random_embeds

PHASES = {"forward early": 999, "forward late": 1}
"""The timestep at which a call of each phase is made."""
Run = Callable[..., Any]


@dataclass(frozen=True)
class Case:
    """What is measured ("pipeline", "forward early", "forward late", "training"), at what size and batch."""

    scope: str
    size: int
    batch: int


def workload(pipe: Any, case: Case, settings: LatencySettings, steps: int | None = None) -> Run:
    """Return the call to measure, on random inputs that don't depend on the method.

    `steps` are a whole run's, if not those of the settings.
    """
    if case.scope == "pipeline":
        return _pipeline_call(pipe, case, settings, steps or settings.steps)
    if case.scope == "training":
        return _training_call(pipe, case)
    return forward_call(pipe, case, settings.guidance_scale)


def forward_call(pipe: Any, case: Case, guidance_scale: float) -> Run:
    """Return one guided call of the U-Net in the case's phase, or at a timestep, on random inputs."""
    unet = pipe.unet
    guided = 2 if guidance_scale > 1 else 1
    side = case.size // pipe.vae_scale_factor
    torch.manual_seed(0)
    like = {"device": unet.device, "dtype": unet.dtype}
    rows = guided * case.batch
    latents = torch.randn(rows, unet.config.in_channels, side, side, **like)
    embeds = random_embeds(unet, rows)
    extra: dict[str, Any] = {}
    if "pooled_prompt_embeds" in embeds:
        time_ids = torch.tensor([[case.size, case.size, 0, 0, case.size, case.size]] * rows, **like)
        extra["added_cond_kwargs"] = {"text_embeds": embeds["pooled_prompt_embeds"], "time_ids": time_ids}
    usual = torch.tensor(PHASES.get(case.scope, 999), device=unet.device)
    return lambda timestep=usual: unet(
        latents, timestep, encoder_hidden_states=embeds["prompt_embeds"], **extra
    )


def _training_call(pipe: Any, case: Case) -> Run:
    """Return one forward and backward pass of the U-Net at an early timestep, without guidance."""
    call = forward_call(pipe, replace(case, scope="forward early"), guidance_scale=1)

    def run() -> None:
        with torch.enable_grad():
            call().sample.square().mean().backward()
        pipe.unet.zero_grad(set_to_none=True)

    return run


def _pipeline_call(pipe: Any, case: Case, settings: LatencySettings, steps: int) -> Run:
    if getattr(pipe, "tokenizer", None) is not None:
        prompt: dict[str, Any] = {"prompt": ["a photograph"] * case.batch}
    else:
        torch.manual_seed(0)
        prompt = random_embeds(pipe.unet, case.batch)
        prompt |= {f"negative_{name}": torch.zeros_like(embeds) for name, embeds in prompt.items()}

    def run() -> Any:
        return pipe(
            **prompt,
            height=case.size,
            width=case.size,
            num_inference_steps=steps,
            guidance_scale=settings.guidance_scale,
            generator=[torch.Generator().manual_seed(i) for i in range(case.batch)],
        )

    return run
