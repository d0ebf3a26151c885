"""A patched pipeline that is saved, shared, moved and offloaded."""

from itertools import cycle

import accelerate
import diffusers
import pytest
import torch
from packaging import version
from recipes import AGENTS_THEN_KEYS

from agentsd import Recipe, StepCache, apply_agentsd, remove_agentsd

RUN = {"num_inference_steps": 8}
EVERYTHING = Recipe(AGENTS_THEN_KEYS.attention, steps=StepCache(2))
CPU = torch.device("cpu")
BLOCKS = {"offload_type": "block_level", "num_blocks_per_group": 1}
CASTING = {"storage_dtype": torch.bfloat16, "compute_dtype": torch.float32}
OFFLOADS = {
    "group": lambda unet: unet.enable_group_offload(onload_device=CPU, **BLOCKS),
    "leaf": lambda unet: unet.enable_group_offload(onload_device=CPU, offload_type="leaf_level"),
    "sequential": lambda unet: accelerate.cpu_offload(unet, execution_device=CPU),
    "model": lambda unet: accelerate.cpu_offload_with_hook(unet, execution_device=CPU),
    "layerwise casting": lambda unet: unet.enable_layerwise_casting(**CASTING),
}
"""What pipelines' own methods put on a U-Net, run on the CPU."""


@pytest.fixture(scope="module")
def images(make_pipeline, sample):
    """Of a baseline pipeline and a patched one."""
    pipe = make_pipeline()
    baseline = sample(pipe, **RUN)
    apply_agentsd(pipe, recipe=EVERYTHING)
    return baseline, sample(pipe, **RUN)


@pytest.mark.parametrize(("name", "patch_first"), [*zip(OFFLOADS, cycle([True, False]))])
def test_offloaded_weights(pipe, sample, images, name, patch_first):
    """An offload changes no bit of the patched image, nor of the one after removal."""
    needs = version.parse("0.42") if name in ("group", "leaf") else version.parse("0")
    if version.parse(diffusers.__version__) < needs and not torch.cuda.is_available():
        pytest.skip("group offloading before diffusers 0.42 needs an accelerator")
    if not patch_first:
        OFFLOADS[name](pipe.unet)
    handle = apply_agentsd(pipe, recipe=EVERYTHING)
    if patch_first:
        OFFLOADS[name](pipe.unet)
    patched = sample(pipe, **RUN)
    assert "f" in handle.summary()
    remove_agentsd(pipe)
    plain = sample(pipe, **RUN)
    assert not torch.equal(patched, plain)
    if name != "layerwise casting":  # which rounds weights
        assert torch.equal(plain, images[0])
        assert torch.equal(patched, images[1])


def test_saving_a_patched_pipeline_saves_a_baseline_one(pipe, sample, tmp_path, images):
    apply_agentsd(pipe, recipe=EVERYTHING)
    pipe.save_pretrained(tmp_path)
    assert "agentsd" not in "".join(p.read_text() for p in tmp_path.rglob("*.json"))
    loaded = diffusers.StableDiffusionPipeline.from_pretrained(tmp_path)
    loaded.set_progress_bar_config(disable=True)
    assert torch.equal(sample(loaded, **RUN), images[0])


def test_pipelines_that_share_a_unet_share_the_patch(pipe, sample, images):
    other = diffusers.AutoPipelineForImage2Image.from_pipe(pipe)
    apply_agentsd(pipe, recipe=EVERYTHING)
    remove_agentsd(other)
    assert torch.equal(sample(pipe, **RUN), images[0])


def test_attention_backends_and_moves_after_the_patch(pipe, sample, images):
    apply_agentsd(pipe, recipe=EVERYTHING)
    pipe.unet.set_attention_backend("native")
    assert torch.equal(sample(pipe, **RUN), images[1])
    pipe.to(torch.bfloat16)
    assert sample(pipe, **RUN).dtype == torch.bfloat16
