"""The peak of memory of DreamBooth's steps on SD 1.5's architecture with random weights."""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import torch
from diffusers import StableDiffusionPipeline
from PIL import Image
from transformers import CLIPTextConfig, CLIPTextModel

from agentsd.dreambooth.config import DreamBoothConfig
from agentsd.dreambooth.training import Run

from ..cost.architectures import build
from .tiny import make_tiny

STEPS = 3


def random_sd15(folder: Path, tiny: bool) -> Path:
    """Write a pipeline of SD 1.5's shapes, or of tiny ones, with the toy model's tokenizer; returns where."""
    from agentsd.demo import load_pipeline  # which not everybody has

    demo: Any = load_pipeline()
    bare = build("sd15", torch.device("cpu"), torch.float32)
    width: dict[str, Any] = {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
    }
    if tiny:
        width = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    parts: dict[str, Any] = {
        "unet": bare.unet,
        "vae": bare.vae,
        "scheduler": bare.scheduler,
        "tokenizer": demo.tokenizer,
        "text_encoder": CLIPTextModel(CLIPTextConfig(vocab_size=49408, **width)),
    }
    unused = {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
    pipe: Any = StableDiffusionPipeline(**parts, **unused)
    pipe.save_pretrained(folder)
    return folder


def train(model: Path, device: str, ratio: float) -> dict[str, Any]:
    """Finetune as configs/dreambooth_sd15.yaml says for a few steps; returns peaks in GB (1e9 bytes)."""
    on_gpu = device.startswith("cuda")
    with TemporaryDirectory() as folder:
        Image.effect_noise((512, 512), 64).convert("RGB").save(Path(folder) / "view.png")
        config = DreamBoothConfig.model_validate(
            {
                "pretrained_model_name_or_path": str(model),
                "instance_data_dir": folder,
                "instance_prompt": "a photo of sks dog",
                "output_dir": Path(folder) / "out",
                "mixed_precision": "fp16" if on_gpu else "no",
                "gradient_checkpointing": True,
                "max_train_steps": STEPS,
                "report_to": "none",
                "ratio": ratio,
            }
        )
        gc.collect()  # the run before has cycles, and its weights would count
        if on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        run = Run(config)
        with mock.patch("agentsd.dreambooth.training.finish"):  # what it saves and draws is not of their peak
            run.train()
        # accelerate keeps what it prepared
        optimizer = type(run.accelerator._optimizers[0].optimizer).__name__
        run.accelerator.free_memory()
    found: dict[str, Any] = {"ratio": ratio, "optimizer": optimizer, "steps": STEPS, "peak_gb": None}
    if on_gpu:
        found["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
        found["reserved_gb"] = torch.cuda.max_memory_reserved() / 1e9
    return found


if __name__ == "__main__":
    device, tiny = sys.argv[1], sys.argv[2:] == ["tiny"]
    if tiny:
        make_tiny()
    with TemporaryDirectory() as folder:
        model = random_sd15(Path(folder), tiny)
        for ratio in (0.4, 0.0):
            print(json.dumps(train(model, device, ratio)), flush=True)
