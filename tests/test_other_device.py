"""On another device, at real size: nothing is read back, nothing of the CPU enters, dtypes stay.

It is torch's meta device, whose tensors have a shape and a dtype and no numbers. To read one raises, and so
does mixing it with a tensor of the CPU, as on a GPU. What would wait for a GPU, or copy to it, shows here.
The structures are the published ones of fewer layers, of the same kinds.
"""

from __future__ import annotations

import re
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from agentsd_eval.cost.architectures import SD15, SDXL
from diffusers import ControlNetModel, DPMSolverMultistepScheduler, UNet2DConditionModel
from torch.utils._python_dispatch import TorchDispatchMode

import agentsd
from agentsd import Phases, Recipe, ResidualSharing, StepCache, apply_agentsd
from agentsd.attention import Agents, Downsample, Merge, PooledAgents
from agentsd.recipe import MODES

PACKAGE = str(Path(agentsd.__file__).parent)

SHALLOW = {"layers_per_block": 1}
STRUCTURES: dict[str, tuple[dict[str, Any], int]] = {
    "SD 1.5": (SD15 | SHALLOW, 64),
    "SD 2.1": (
        {"sample_size": 96, "cross_attention_dim": 1024, "attention_head_dim": (5, 10, 20, 20)}
        | {"use_linear_projection": True, "upcast_attention": True}
        | SHALLOW,
        96,
    ),
    "SDXL": (SDXL | SHALLOW | {"transformer_layers_per_block": (1, 1, 2)}, 128),
}
KEYS = Downsample(4, at_most=None)
RECIPES = {
    **MODES,
    "merged and pooled": Recipe(Phases(PooledAgents(), Merge(0.5))),
    "all": Recipe(Phases(Agents(), KEYS), residual=ResidualSharing(2), steps=StepCache(2)),
}


COPIED = {
    "ranking.py:_to": "destinations, drawn on the CPU so that a seed gives one image on every device; they "
    "travel from pinned memory, and the host does not wait",
    "downsample.py:_first_of_cells": "places of keys, once for each operator of a run",
}
"""What agentsd itself copies to the device, and why."""


class Traffic(TorchDispatchMode):
    """Notes copies between devices, what is read back, and numbers of 64 bits, by the line that asked."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[str] = []
        self.reads: list[str] = []
        self.doubles: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name == "equal" and args[0].device.type == "meta":  # which has no such operation
            self.reads.append(_asker())
            return args[0].ndim == 4  # two passes: the same latents twice, on other texts
        out = func(*args, **kwargs or {})
        if isinstance(out, torch.Tensor):
            source = {"_to_copy": 0, "copy_": 1}.get(name)
            if source is not None and args[source].device != out.device:
                self.copies.append(_asker())
            if out.dtype == torch.float64 and out.device.type == "meta":
                self.doubles.append(_asker())
        return out


def _asker() -> str:
    """The innermost line that is agentsd's, or the host's."""
    frames = [frame for frame in traceback.extract_stack() if f"{PACKAGE}/" in frame.filename]
    host = not frames or frames[-1].name in ("_recompute", "__call__", "wrapped")
    return "host" if host else f"{Path(frames[-1].filename).name}:{frames[-1].name}"


def build(structure: str, dtype: torch.dtype) -> tuple[Any, dict[str, Any], torch.Tensor]:
    """A U-Net, the arguments of its calls, and its first latents."""
    config, side = STRUCTURES[structure]
    with torch.device("meta"):
        unet = UNet2DConditionModel(**config).to(dtype).eval()
        latents = torch.empty(2, 4, side, side, dtype=dtype)
        given: dict[str, Any] = {
            "encoder_hidden_states": torch.empty(2, 77, config["cross_attention_dim"], dtype=dtype)
        }
        if structure == "SDXL":
            given["added_cond_kwargs"] = {
                "text_embeds": torch.empty(2, 1280, dtype=dtype),
                "time_ids": torch.empty(2, 6, dtype=dtype),
            }
    return unet, given, latents


@torch.no_grad()
def run(unet: Any, given: dict[str, Any], latents: torch.Tensor, steps: int = 9) -> Traffic:
    """A run of a sampler, each call of which is guided by two passes."""
    scheduler = DPMSolverMultistepScheduler(use_karras_sigmas=True)
    scheduler.set_timesteps(steps)
    sample = latents[:1]
    traffic = Traffic()
    for t in scheduler.timesteps:
        with traffic:
            output = unet(torch.cat([sample, sample]), t, **given).sample
        assert (output.device.type, output.dtype) == ("meta", latents.dtype)
        assert output.shape == (2, 4, *latents.shape[2:])
        without, withs = output.chunk(2)
        sample = scheduler.step(without + 7.5 * (withs - without), t, sample).prev_sample
    return traffic


def check(traffic: Traffic) -> None:
    own = {line for line in traffic.copies if line != "host"}
    assert own <= set(COPIED)
    assert traffic.doubles == []
    assert traffic.reads == []


@pytest.mark.parametrize("name", RECIPES)
def test_nothing_is_read_back_and_nothing_copied_but_what_is_named(name):
    unet, given, latents = build("SD 1.5", torch.float16)
    with apply_agentsd(unet, recipe=RECIPES[name]) as handle:
        traffic = run(unet, given, latents)
        summary = handle.summary()
    check(traffic)
    corrected = re.search(r"(\d+) corrected", summary)
    again = int(corrected[1]) if corrected else 0
    assert traffic.copies.count("host") == 9 + again  # the timestep, in each call and each correction
    assert name != "fast" or len(traffic.copies) <= 10 + again  # places of keys, once a run


@pytest.mark.parametrize(("name", "structure"), [("agentsd", "SDXL"), ("all", "SD 2.1")])
def test_other_structures(name, structure):
    unet, given, latents = build(structure, torch.bfloat16)
    with apply_agentsd(unet, recipe=RECIPES[name]):
        check(run(unet, given, latents))


def test_controlnet_and_the_unet_together():
    unet, given, latents = build("SD 1.5", torch.float16)
    with torch.device("meta"):
        control = (
            ControlNetModel(cross_attention_dim=768, attention_head_dim=8, **SHALLOW).to(torch.float16).eval()
        )
        hint = torch.empty(2, 3, 512, 512, dtype=torch.float16)

    def with_control(sample: Any, t: Any, **kwargs: Any) -> Any:
        if "down_block_additional_residuals" not in kwargs:
            down, mid = control(sample, t, controlnet_cond=hint, return_dict=False, **kwargs)
            kwargs |= {"down_block_additional_residuals": down, "mid_block_additional_residual": mid}
        return unet(sample, t, **kwargs)

    with apply_agentsd(unet, recipe=RECIPES["all"]):
        check(run(with_control, given, latents))
