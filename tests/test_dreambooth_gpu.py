"""DreamBooth on a CUDA device: what a 12 GB card does, and half precision; run with `pytest -m gpu`."""

import pytest
import torch
from agentsd_eval.cost.architectures import build
from diffusers import StableDiffusionPipeline
from PIL import Image
from transformers import CLIPTextConfig, CLIPTextModel

from agentsd.dreambooth.config import DreamBoothConfig
from agentsd.dreambooth.training import Run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture
def subject(tmp_path):
    """An image of a subject."""
    Image.new("RGB", (512, 512), "teal").save(tmp_path / "view.png")
    return tmp_path


def settings(model, subject, **changes):
    base = {
        "pretrained_model_name_or_path": str(model),
        "instance_data_dir": subject,
        "instance_prompt": "a sks cat",
        "output_dir": subject / "out",
        "num_inference_steps": 2,
        "num_validation_images": 1,
        "report_to": None,
    }
    return DreamBoothConfig(**base | changes)


@pytest.mark.parametrize("mixed_precision", ["fp16", "bf16"])
@pytest.mark.parametrize("rank", [None, 2])
def test_half_precision_trains_validates_and_resumes(model_folder, subject, mixed_precision, rank):
    """Under a gradient scaler, "Attempting to unscale FP16 gradients" must not come up."""
    first = settings(
        model_folder,
        subject,
        mixed_precision=mixed_precision,
        rank=rank,
        gradient_checkpointing=True,
        validation_prompt="a sks cat",
        validation_steps=2,
        checkpointing_steps=3,
        max_train_steps=3,
        use_8bit_adam=False,
        resolution=32,
    )
    Run(first).train()
    rest = first.model_copy(update={"max_train_steps": 6, "resume_from_checkpoint": "latest"})
    run = Run(rest)
    run.train()
    assert run.step == 6


def test_sd15_at_512_px_fits_12_gb(tokenizer, subject):
    pytest.importorskip("bitsandbytes", reason="needs bitsandbytes (agentsd[train])")
    bare = build("sd15", torch.device("cpu"), torch.float32)
    text = CLIPTextModel(CLIPTextConfig(vocab_size=len(tokenizer), hidden_size=768, num_attention_heads=12))
    parts = {"unet": bare.unet, "vae": bare.vae, "scheduler": bare.scheduler, "text_encoder": text}
    parts |= {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
    StableDiffusionPipeline(tokenizer=tokenizer, **parts).save_pretrained(subject / "sd15")
    cap = 12e9 / torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(cap)
    try:
        config = settings(
            subject / "sd15",
            subject,
            mixed_precision="fp16",
            gradient_checkpointing=True,
            max_train_steps=3,
            resolution=512,
        )
        assert (Run(config).train() / "unet").exists()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
