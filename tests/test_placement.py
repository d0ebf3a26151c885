"""A patched pipeline that is saved, shared, moved and offloaded."""

import accelerate
import diffusers
import pytest
import torch
from packaging import version
from recipes import AGENTS_THEN_KEYS

from agentsd import apply_agentsd, remove_agentsd


def test_saving_a_patched_pipeline_saves_a_baseline_one(pipe, sample, tmp_path):
    baseline = sample(pipe)
    apply_agentsd(pipe, recipe=AGENTS_THEN_KEYS)
    patched = sample(pipe)
    pipe.save_pretrained(tmp_path)
    assert "agentsd" not in "".join(p.read_text() for p in tmp_path.rglob("*.json"))
    loaded = diffusers.StableDiffusionPipeline.from_pretrained(tmp_path)
    loaded.set_progress_bar_config(disable=True)
    assert torch.equal(sample(loaded), baseline)
    apply_agentsd(loaded, recipe=AGENTS_THEN_KEYS)
    assert torch.equal(sample(loaded), patched)


def test_pipelines_that_share_a_unet_share_the_patch(pipe, sample):
    baseline = sample(pipe)
    other = diffusers.AutoPipelineForImage2Image.from_pipe(pipe)
    assert other.unet is pipe.unet
    apply_agentsd(pipe, recipe=AGENTS_THEN_KEYS)
    assert not torch.equal(sample(pipe), baseline)
    remove_agentsd(other)
    assert torch.equal(sample(pipe), baseline)


@pytest.mark.parametrize("patch_first", [True, False])
@pytest.mark.parametrize("offload", ["group", "casting"])
def test_group_offloading_and_layerwise_casting(pipe, sample, offload, patch_first):
    baseline = sample(pipe)
    if patch_first:
        apply_agentsd(pipe, recipe=AGENTS_THEN_KEYS)
    if offload == "group":
        if version.parse(diffusers.__version__) < version.parse("0.42") and not torch.cuda.is_available():
            pytest.skip("group offloading before diffusers 0.42 needs an accelerator")
        cpu = torch.device("cpu")
        pipe.unet.enable_group_offload(onload_device=cpu, offload_device=cpu, offload_type="leaf_level")
    else:
        pipe.unet.enable_layerwise_casting(storage_dtype=torch.bfloat16, compute_dtype=torch.float32)
    if not patch_first:
        apply_agentsd(pipe, recipe=AGENTS_THEN_KEYS)
    patched = sample(pipe)
    remove_agentsd(pipe)
    plain = sample(pipe)
    assert not torch.equal(patched, plain)
    if offload == "group":
        assert torch.equal(plain, baseline)
        apply_agentsd(pipe, recipe=AGENTS_THEN_KEYS)
        assert torch.equal(sample(pipe), patched)


@pytest.mark.parametrize("patch_first", [True, False])
@pytest.mark.parametrize("kind", ["model", "sequential"])
def test_accelerates_offloading_hooks(pipe, sample, kind, patch_first):
    """What enable_model_cpu_offload and enable_sequential_cpu_offload put on a U-Net, run on the CPU."""
    baseline = sample(pipe)
    if patch_first:
        apply_agentsd(pipe, recipe=AGENTS_THEN_KEYS)
    if kind == "model":
        pipe.unet, _ = accelerate.cpu_offload_with_hook(pipe.unet, execution_device="cpu")
    else:
        accelerate.cpu_offload(pipe.unet, execution_device=torch.device("cpu"))
    if not patch_first:
        apply_agentsd(pipe, recipe=AGENTS_THEN_KEYS)
    patched = sample(pipe)
    assert not torch.equal(patched, baseline)
    remove_agentsd(pipe)
    assert torch.equal(sample(pipe), baseline)
    with apply_agentsd(pipe, recipe=AGENTS_THEN_KEYS):
        assert torch.equal(sample(pipe), patched)


def test_attention_backends_and_moves_after_the_patch(pipe, sample):
    apply_agentsd(pipe, recipe=AGENTS_THEN_KEYS)
    patched = sample(pipe)
    pipe.unet.set_attention_backend("native")
    assert torch.equal(sample(pipe), patched)
    assert sample(pipe).dtype == torch.float32
    pipe.to(torch.bfloat16)
    assert sample(pipe).dtype == torch.bfloat16
