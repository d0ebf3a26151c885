"""The bare architectures are the published ones."""

import pytest
import torch
from agentsd_eval.cost.architectures import build, random_embeds
from agentsd_eval.cost.latency import Case, workload
from agentsd_eval.images.other_packages import finest_attention_downsample
from agentsd_eval.settings import LatencySettings


# Parameters of the published U-Nets and of their shared autoencoder.
@pytest.mark.parametrize(
    ("arch", "parameters", "size", "finest"),
    [("sd15", 859_520_964, 512, 1), ("sdxl", 2_567_463_684, 1024, 2)],
)
def test_parameters_and_shapes(arch, parameters, size, finest):
    pipe = build(arch, torch.device("meta"), torch.float16)
    assert sum(p.numel() for p in pipe.unet.parameters()) == parameters
    assert sum(p.numel() for p in pipe.vae.parameters()) == 83_653_863
    assert {p.dtype for p in pipe.unet.parameters()} == {torch.float16}
    assert finest_attention_downsample(pipe.unet) == finest
    run = workload(pipe, Case("forward early", size, 1), LatencySettings())
    assert run().sample.shape == (2, 4, size // 8, size // 8)  # guided: two rows
    assert ("pooled_prompt_embeds" in random_embeds(pipe.unet, 1, torch.Generator())) == (arch == "sdxl")
