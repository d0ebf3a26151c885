"""What only a CUDA device can show; run with `pytest -m gpu`."""

import pytest
import torch
from diffusers import DDIMScheduler
from recipes import AGENTS_THEN_KEYS
from tiny import call, make_unet

from agentsd import Agents, Downsample, Phases, Recipe, apply_agentsd, remove_agentsd
from agentsd.run import Run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("t", [999, 1])
def test_same_bits_in_every_call(dtype, t):
    unet = make_unet().to("cuda", dtype)
    apply_agentsd(unet, recipe=AGENTS_THEN_KEYS)
    first, *others = (call(unet, t, (32, 32), dtype=dtype, device="cuda") for _ in range(11))
    assert first.isfinite().all()
    assert all(torch.equal(other, first) for other in others)


@pytest.mark.parametrize("t", [999, 1])
def test_cuda_agrees_with_the_cpu(t, monkeypatch):
    """Without TF32, whose products have 10 bits, also in convolutions, where they are usual."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    unet = make_unet()
    apply_agentsd(unet, recipe=Recipe(Phases(Agents(destinations="first"), Downsample())))
    expected = call(unet, t, (32, 32))
    made = call(unet.to("cuda"), t, (32, 32), device="cuda")
    torch.testing.assert_close(made.cpu(), expected, rtol=0, atol=1e-4)


def test_the_timestep_is_read_without_waiting_for_the_device():
    scheduler = DDIMScheduler()
    scheduler.set_timesteps(10, device="cuda")
    run = Run(Phases(Agents(), None, 0.4))
    run.place(None, scheduler.timesteps[0])  # the list itself is fetched once
    torch.cuda.set_sync_debug_mode("error")
    try:
        steps = [run.place(None, t) for t in scheduler.timesteps]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [s.stage for s in steps] == [0] * 4 + [1] * 6
    assert [s.timestep for s in steps] == scheduler.timesteps.tolist()


@pytest.mark.parametrize("offload", ["enable_model_cpu_offload", "enable_sequential_cpu_offload"])
@pytest.mark.parametrize("patch_first", [True, False])
def test_cpu_offloading(make_pipeline, sample, offload, patch_first):
    pipe = make_pipeline()
    if patch_first:
        apply_agentsd(pipe, recipe=AGENTS_THEN_KEYS)
    getattr(pipe, offload)()
    if not patch_first:
        apply_agentsd(pipe, recipe=AGENTS_THEN_KEYS)
    patched = sample(pipe)
    assert torch.equal(sample(pipe), patched)
    remove_agentsd(pipe)
    assert not torch.equal(sample(pipe), patched)
