"""What only a CUDA device can show; run with `pytest -m gpu`."""

import pytest
import torch
from recipes import AGENTS_THEN_KEYS
from tiny import make_unet

from agentsd import Agents, Downsample, Phases, Recipe, apply_agentsd, remove_agentsd
from agentsd.run import Run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def call(unet, t, dtype, size=32):
    rng = torch.Generator().manual_seed(0)
    latent = torch.randn(2, 4, size, size, generator=rng).to("cuda", dtype)
    text = torch.randn(2, 7, 16, generator=rng).to("cuda", dtype)
    with torch.no_grad():
        return unet(latent, torch.tensor(t, device="cuda"), text).sample


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("t", [999, 1])
def test_same_bits_in_every_call(dtype, t):
    unet = make_unet().to("cuda", dtype)
    apply_agentsd(unet, recipe=AGENTS_THEN_KEYS)
    first = call(unet, t, dtype)
    assert first.isfinite().all()
    for _ in range(10):
        assert torch.equal(call(unet, t, dtype), first)


@pytest.fixture
def no_tf32(monkeypatch):
    """Whose products have 10 bits, also in convolutions, where they are usual."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)


@pytest.mark.usefixtures("no_tf32")
@pytest.mark.parametrize("t", [999, 1])
def test_cuda_agrees_with_the_cpu(t):
    unet = make_unet()
    apply_agentsd(unet, recipe=Recipe(Phases(Agents(destinations="first"), Downsample())))
    rng = torch.Generator().manual_seed(0)
    latent, text = torch.randn(2, 4, 32, 32, generator=rng), torch.randn(2, 7, 16, generator=rng)
    with torch.no_grad():
        expected = unet(latent, torch.tensor(t), text).sample
    torch.testing.assert_close(call(unet.to("cuda"), t, torch.float32).cpu(), expected, rtol=0, atol=1e-4)


def test_the_timestep_is_read_without_waiting_for_the_device():
    from diffusers import DDIMScheduler

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


def test_peak_memory_is_not_above_baseline():
    """At 96x96 latents, where the score matrix of the ranking would be the largest tensor.

    The maps of tokens and the allocator's rounding are a hundredth of the peak.
    """

    def peak(unet):
        call(unet, 1, torch.float16, 96)
        torch.cuda.reset_peak_memory_stats()
        for t in (999, 1):
            call(unet, t, torch.float16, 96)
        return torch.cuda.max_memory_allocated()

    unet = make_unet(block_out_channels=(64, 128, 128), norm_num_groups=8).to("cuda", torch.float16)
    baseline = peak(unet)
    apply_agentsd(unet, recipe=AGENTS_THEN_KEYS)
    assert peak(unet) <= 1.05 * baseline
