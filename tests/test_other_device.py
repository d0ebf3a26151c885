"""On another device, at real size: nothing is read back, nothing of the CPU enters, dtypes stay.

It is torch's meta device, whose tensors have a shape and a dtype and no numbers. To read one raises, and so
does mixing it with a tensor of the CPU, as on a GPU. What would wait for a GPU, or copy to it, shows here.
The structures are the published ones of fewer layers, of the same kinds.
"""

import re
import traceback
from pathlib import Path

import pytest
import torch
from agentsd_eval.cost.architectures import SD15, SDXL
from diffusers import DPMSolverMultistepScheduler, UNet2DConditionModel
from torch.utils._python_dispatch import TorchDispatchMode

import agentsd
from agentsd import Phases, Recipe, ResidualSharing, StepCache, apply_agentsd
from agentsd.attention import Agents, Downsample, Merge, PooledAgents
from agentsd.recipe import MODES

PACKAGE = str(Path(agentsd.__file__).parent)
SHALLOW = {"layers_per_block": 1}
SD21 = {
    "sample_size": 96,
    "cross_attention_dim": 1024,
    "attention_head_dim": (5, 10, 20, 20),
    "use_linear_projection": True,
    "upcast_attention": True,
}
STRUCTURES = {
    "SD 1.5": (SD15 | SHALLOW, 64),
    "SD 2.1": (SD21 | SHALLOW, 96),
    "SDXL": (SDXL | SHALLOW | {"transformer_layers_per_block": (1, 1, 2)}, 128),
}
KEYS = Downsample(4, at_most=None)
RECIPES = {
    **MODES,
    "merged and pooled": Recipe(Phases(PooledAgents(), Merge(0.5))),
    "all": Recipe(Phases(Agents(), KEYS), residual=ResidualSharing(2), steps=StepCache(2)),
}
COPIED = {
    "ranking.py:_to",  # destinations, drawn on the CPU so that a seed gives one image on every device; they
    # travel from pinned memory, and the host does not wait
    "downsample.py:_first_of_cells",  # places of keys, once for each operator of a run
}
"""What agentsd itself copies to the device."""


class Traffic(TorchDispatchMode):
    """Notes copies between devices, what is read back, and numbers of 64 bits, by the line that asked."""

    def __init__(self):
        super().__init__()
        self.copies, self.reads, self.doubles = [], [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
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

    def check(self):
        assert {line for line in self.copies if line != "host"} <= COPIED
        assert self.doubles == self.reads == []


def _asker():
    """The innermost line that is agentsd's, or the host's."""
    frames = [frame for frame in traceback.extract_stack() if f"{PACKAGE}/" in frame.filename]
    host = not frames or frames[-1].name in ("_recompute", "__call__", "wrapped")
    return "host" if host else f"{Path(frames[-1].filename).name}:{frames[-1].name}"


def build(structure, dtype):
    """A U-Net, the arguments of its calls, and its first latents."""
    config, side = STRUCTURES[structure]
    with torch.device("meta"), torch.no_grad():
        unet = UNet2DConditionModel(**config).to(dtype).eval()
        latents = torch.empty(2, 4, side, side, dtype=dtype)
        given = {"encoder_hidden_states": torch.empty(2, 77, config["cross_attention_dim"], dtype=dtype)}
        if structure == "SDXL":
            sizes = {
                "text_embeds": torch.empty(2, 1280, dtype=dtype),
                "time_ids": torch.empty(2, 6, dtype=dtype),
            }
            given["added_cond_kwargs"] = sizes
    return unet, given, latents


@torch.no_grad()
def run(unet, given, latents):
    """A run of a sampler, each call of which is guided by two passes."""
    scheduler, sample, traffic = DPMSolverMultistepScheduler(use_karras_sigmas=True), latents[:1], Traffic()
    scheduler.set_timesteps(9)
    for t in scheduler.timesteps:
        with traffic:
            output = unet(torch.cat([sample, sample]), t, **given).sample
        assert (output.device.type, output.dtype) == ("meta", latents.dtype)
        assert output.shape == (2, 4, *latents.shape[2:])
        without, withs = output.chunk(2)
        sample = scheduler.step(without + 7.5 * (withs - without), t, sample).prev_sample
    return traffic


@pytest.mark.parametrize("name", RECIPES)
def test_nothing_is_read_back_and_nothing_copied_but_what_is_named(name):
    unet, given, latents = build("SD 1.5", torch.float16)
    with apply_agentsd(unet, recipe=RECIPES[name]) as handle:
        traffic = run(unet, given, latents)
        summary = handle.summary()
    traffic.check()
    again = sum(map(int, re.findall(r"(\d+) corrected", summary)))
    assert traffic.copies.count("host") == 9 + again  # the timestep, in each call and each correction
    assert name != "fast" or len(traffic.copies) <= 10 + again  # places of keys, once a run


@pytest.mark.parametrize(("name", "structure"), [("agentsd", "SDXL"), ("all", "SD 2.1")])
def test_other_structures(name, structure):
    unet, given, latents = build(structure, torch.bfloat16)
    with apply_agentsd(unet, recipe=RECIPES[name]):
        run(unet, given, latents).check()
