"""Finetune the patched attention of the embedded model, the same short budget for each kind.

`python -m agentsd.demo.adapt FOLDER --attention focused` leaves settings and weights in FOLDER, for
`apply_agentsd(pipe, config=FOLDER)`. A repeated call resumes.
"""

import signal
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich import print

from ..config import AgentConfig
from ..patch import apply_agentsd
from .autoencoder import encode, to_pixels
from .config import DiffusionConfig
from .data import caption_of, load_references
from .diffusion import DiffusionLoss, tokenize, train_diffusion
from .pipeline_io import load_pipeline


def adapt(
    folder: Path, agent: AgentConfig, budget: DiffusionConfig, seed: int = 0, device: str = "cpu"
) -> None:
    """Train the patched layers' projections and modules, and nothing else, on the pictures of seen pairs."""
    pipe: Any = load_pipeline(device=device)
    seen = [reference for reference in load_references() if reference.split == "seen"]
    pixels = to_pixels([reference.image for reference in seen]).to(device)
    latents = torch.stack([encode(pipe.vae, pixels)]) * pipe.vae.config.scaling_factor
    pipe.unet.requires_grad_(False)
    pipe.text_encoder.requires_grad_(False)
    handle = apply_agentsd(pipe, config=agent)
    for weight in handle.parameters():
        weight.requires_grad_(True)
    train_diffusion(
        DiffusionLoss(pipe.unet, pipe.text_encoder, budget),
        latents,
        tokenize(pipe.tokenizer, [reference.caption for reference in seen]),
        tokenize(pipe.tokenizer, [caption_of(reference.concept, None) for reference in seen]),
        tokenize(pipe.tokenizer, [""]),
        budget,
        folder / "training",
        seed=seed,
        device=torch.device(device),
    )
    handle.save(folder)


def main(
    folder: Annotated[Path, typer.Argument(help="where settings, weights and checkpoints go")],
    attention: Annotated[str, typer.Option(help="module, focused, attnzero, or stock")] = "module",
    without: Annotated[list[str] | None, typer.Option(help="bias or convolution; repeat")] = None,
    levels: Annotated[int, typer.Option(help="attention levels, from the finest one")] = 1,
    steps: Annotated[int, typer.Option(help="training steps")] = 1000,
    batch: Annotated[int, typer.Option(help="pictures a step")] = 8,
    lr: Annotated[float, typer.Option(help="learning rate, with a warm-up and a cosine to 0")] = 2e-4,
    device: Annotated[str, typer.Option(help="cpu, cuda ...")] = "cpu",
) -> None:
    """Finetune one kind of attention in every step, or stock attention for comparison."""
    parts = tuple(part for part in AgentConfig.parts if part not in (without or ()))
    kind = {"early": "none", "late": "none"} if attention == "stock" else {"attention": attention}
    agent = AgentConfig(early_frac=1.0, levels=levels, parts=parts, **kind)  # type: ignore[arg-type]
    # The text encoder is frozen, so what a style does to its words is no matter of this training.
    budget = DiffusionConfig(
        steps=steps, batch=batch, lr=lr, warmup=50, flips=False, compile=False, leak_weight=0
    )
    adapt(folder, agent, budget, device=device)
    print(f"saved to {folder}")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # being ended saves a checkpoint too
    typer.run(main)
