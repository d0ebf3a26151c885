"""Stable Diffusion on tensors that have a shape and a dtype and no numbers: at real size, in seconds."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from diffusers import DPMSolverMultistepScheduler, UNet2DConditionModel
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..cost.architectures import SD15, SDXL
from ..images.methods import Method
from ..settings import Backend

METHODS: tuple[tuple[str, Backend], ...] = (
    ("baseline", "unfused"),
    ("tomesd", "unfused"),
    ("agentsd", "unfused"),
    ("baseline", "sdpa"),
    ("baseline@17", "sdpa"),
    ("baseline@12", "sdpa"),
    ("tomesd", "sdpa"),
    ("agentsd", "sdpa"),
    ("fast", "sdpa"),
)
"""What is asked of, and how other attention is computed: as the paper's tables have it, or fused."""
FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def make_tiny() -> None:
    """Let both architectures be of tiny widths from here on, to try what is to run on a GPU."""
    SD15.update(block_out_channels=(32, 32, 32, 32), cross_attention_dim=32, sample_size=16)
    SDXL.update(block_out_channels=(32, 32, 32), transformer_layers_per_block=(1, 1, 1))
    SDXL.update(cross_attention_dim=32, attention_head_dim=(2, 2, 2), sample_size=16)


class FusedAttention(TorchFunctionMode):
    """Attention that keeps no scores, as a GPU's; without it such tensors take torch's unfused path."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.scaled_dot_product_attention:
            return _flash(*args, **kwargs or {})
        return func(*args, **kwargs or {})


def _flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    out: Tensor = FLASH(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]
    return out


def unet(config: Mapping[str, Any] = SD15) -> Any:
    """Return a U-Net with random weights, SD 1.5's where nothing else is said."""
    model: Any = UNet2DConditionModel(**config)
    return model.eval()


def in_dtype(build: Callable[[], Any], dtype: torch.dtype, device: str = "cpu") -> Any:
    """Return the model that `build` makes, with weights of that type, on that device."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return build()
    finally:
        torch.set_default_dtype(before)


def denoise(
    method: Method,
    model: Any,
    size: int,
    images: int,
    steps: int,
    after_step: Callable[[], object] = lambda: None,
) -> Tensor:
    """Return the latents of a guided run of DPM++ 2M (Karras) with a method, where `model` lives.

    Args:
        method: applied for the run; a number of steps of its own comes before `steps`.
        model: Stable Diffusion's U-Net.
        size: pixels on a side.
        images: in a batch; the U-Net's is twice as large.
        steps: of the sampler.
        after_step: called when a step's own tensors are gone.
    """
    like: dict[str, Any] = {"dtype": model.dtype, "device": model.device}
    latents = torch.zeros(images, 4, size // 8, size // 8, **like)
    text = torch.zeros(2 * images, 77, model.config.cross_attention_dim, **like)
    conditions: dict[str, Any] = {}
    if model.config.addition_embed_type == "text_time":  # SDXL
        widths = {"text_embeds": 1280, "time_ids": 6}
        conditions = {name: torch.zeros(2 * images, width, **like) for name, width in widths.items()}
    scheduler: Any = DPMSolverMultistepScheduler(use_karras_sigmas=True)
    scheduler.set_timesteps(method.steps or steps)
    with torch.no_grad(), method.applied(model):
        for t in scheduler.timesteps:
            unconditional, conditional = model(
                torch.cat([latents] * 2), t, text, added_cond_kwargs=conditions
            ).sample.chunk(2)
            guided = unconditional + 7.5 * (conditional - unconditional)
            latents = scheduler.step(guided, t, latents).prev_sample
            del unconditional, conditional, guided
            after_step()
    return latents
