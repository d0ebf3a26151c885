"""DreamBooth on a CUDA device: what a 12 GB card does, and half precision; run with `pytest -m gpu`."""

import pytest
import torch
from agentsd_eval.cost.architectures import build
from diffusers import StableDiffusionPipeline
from dreamboothing import start, train
from transformers import CLIPTextConfig, CLIPTextModel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("mixed_precision", ["fp16", "bf16"])
@pytest.mark.parametrize("rank", [None, 2])
def test_half_precision_trains_validates_and_resumes(run_config, mixed_precision, rank):
    """Under a gradient scaler, "Attempting to unscale FP16 gradients" must not come up."""
    more = {"mixed_precision": mixed_precision, "rank": rank, "gradient_checkpointing": True}
    more |= {"validation_prompt": "a sks cat", "validation_steps": 2, "checkpointing_steps": 3}
    train(run_config(max_train_steps=3, **more))
    run = start(run_config(max_train_steps=6, resume_from_checkpoint="latest", **more))
    run.train()
    assert run.step == 6


def test_sd15_at_512_px_fits_12_gb(tokenizer, run_config, tmp_path):
    pytest.importorskip("bitsandbytes", reason="needs bitsandbytes (agentsd[train])")
    bare = build("sd15", torch.device("cpu"), torch.float32)
    text = CLIPTextModel(CLIPTextConfig(vocab_size=len(tokenizer), hidden_size=768, num_attention_heads=12))
    parts = {"unet": bare.unet, "vae": bare.vae, "scheduler": bare.scheduler, "text_encoder": text}
    parts |= {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
    StableDiffusionPipeline(tokenizer=tokenizer, **parts).save_pretrained(tmp_path / "sd15")
    cap = 12e9 / torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(cap)
    try:
        config = run_config(
            pretrained_model_name_or_path=str(tmp_path / "sd15"),
            mixed_precision="fp16",
            gradient_checkpointing=True,
            use_8bit_adam=None,
            max_train_steps=3,
            resolution=512,
        )
        assert (train(config) / "unet").exists()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
