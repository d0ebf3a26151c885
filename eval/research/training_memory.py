"""The memory of a DreamBooth step on SD 1.5 at 512 px, computed by parts, as Markdown tables."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from diffusers import UNet2DConditionModel
from transformers import CLIPTextConfig

from agentsd.dreambooth.config import DreamBoothConfig
from agentsd.dreambooth.memory import training_memory

from ..cost.architectures import SD15, autoencoder

TEXT: dict[str, Any] = {
    "vocab_size": 49408,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
}
PRIOR: dict[str, Any] = {"with_prior_preservation": True, "class_data_dir": "c", "class_prompt": "c"}
AHEAD: dict[str, Any] = {"cache_latents": True, "center_crop": True, "pre_compute_text_embeddings": True}
RUNS: dict[str, dict[str, Any]] = {
    "the preset": {},
    "encoded ahead": AHEAD,
    "prior preservation": PRIOR,
    "text encoder trained": {"train_text_encoder": True},
    "both": PRIOR | {"train_text_encoder": True},
    "two batches a step": {"gradient_accumulation_steps": 2},
    "plain AdamW": {"use_8bit_adam": False},
    "LoRA": {"rank": 4},
    "LoRA, prior, text encoder": PRIOR | {"rank": 4, "train_text_encoder": True},
    "LoRA, encoded ahead": AHEAD | {"rank": 4},
}
"""Beside fp16, batch 1, gradient checkpointing and 8-bit AdamW, as in configs/dreambooth_sd15.yaml."""


def write_settings(folder: Path) -> str:
    """Write SD 1.5's files of settings, without weights; returns where."""
    with torch.device("meta"):
        unet: Any = UNet2DConditionModel(**SD15)
        unet.save_config(folder / "unet")
        autoencoder().save_config(folder / "vae")
    CLIPTextConfig(**TEXT).save_pretrained(folder / "text_encoder")
    return str(folder)


def parts_of(model: str, fused: bool = True, **changes: Any) -> dict[str, float]:
    """The parts of a run's step in GB (1e9 bytes)."""
    own = {"instance_data_dir": "i", "instance_prompt": "i", "mixed_precision": "fp16", "resolution": 512}
    own |= {"pretrained_model_name_or_path": model, "gradient_checkpointing": True}
    config = DreamBoothConfig.model_validate(own | changes)
    found = training_memory(config, config.use_8bit_adam is not False, fused)
    return {name: size / 1e9 for name, size in found.items()}


def main() -> None:
    """Print both tables."""
    with TemporaryDirectory() as folder:
        model = write_settings(Path(folder))
        first = parts_of(model)
        print("|  |", " | ".join(first), "| in all |")
        print("| --- " * (len(first) + 2) + "|")
        for label, changes in RUNS.items():
            parts = parts_of(model, **changes)
            figures = [*parts.values(), sum(parts.values())]
            print(f"| {label} |", " | ".join(f"{size:.2f}" for size in figures), "|")
        print()
        for label, changes in {"checkpointing": {}, "none": {"gradient_checkpointing": False}}.items():
            for batch in (1, 4):
                for fused in (True, False):
                    row = [
                        sum(parts_of(model, fused, train_batch_size=batch, **changes, **how).values())
                        for how in ({"apply": "none"}, {"ratio": 0.0}, {"ratio": 0.4})
                    ]
                    kind = "fused" if fused else "unfused"
                    print(
                        f"| {label}, batch {batch}, {kind} |", " | ".join(f"{size:.2f}" for size in row), "|"
                    )


if __name__ == "__main__":
    main()
