"""How fast scenes are composed and encoded, beside a training step: what could hold a GPU back.

`python -m agentsd_demo.training.rates --config configs/demo_model_gpu.yaml`
"""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from ..pipeline_io import load_pipeline
from ..scenes import random_scene, triples
from .autoencoder import encode
from .config import load_config
from .diffusion import DiffusionLoss, tokenize


def cpu_seconds(work: Callable[[], Any], repeats: int) -> float:
    """Return the median CPU seconds of a call, after one that isn't counted."""
    spent = []
    for _ in range(repeats + 1):
        start = time.process_time()
        work()
        spent.append(time.process_time() - start)
    return median(spent[1:])


def main(
    config: Annotated[Path, typer.Option(help="YAML recipe whose canvas sizes are measured")],
    images: Annotated[int, typer.Option(help="in a batch")] = 8,
    repeats: Annotated[int, typer.Option(help="of each measurement; the median counts")] = 3,
) -> None:
    """Print CPU seconds an image of each canvas size: composing, encoding, a training step without AdamW."""
    recipe = load_config(config)
    pipe: Any = load_pipeline()
    among = triples("seen", recipe.concepts)
    loss = DiffusionLoss(pipe.unet, pipe.text_encoder, recipe.diffusion)
    ids = tokenize(pipe.tokenizer, [triple.caption for triple in among[:images]])
    t = torch.full((len(ids),), len(loss.noise) // 2)
    sizes = sorted({size for stage in recipe.diffusion.stages for size in stage.sizes})
    for size in sizes:
        pixels = torch.zeros(len(ids), 3, size, size)
        latents = encode(pipe.vae, pixels)

        def step(latents: Tensor = latents) -> None:
            loss(latents, torch.ones_like(latents), t, ids).backward()

        def compose(size: int = size) -> None:
            for i in range(100):
                random_scene(f"rates/{i}", size, among=among)

        composing = cpu_seconds(compose, repeats) / 100
        encoding = cpu_seconds(partial(encode, pipe.vae, pixels), repeats) / len(ids)
        training = cpu_seconds(step, repeats) / len(ids)
        rate, share = 1 / composing, encoding / (encoding + training)
        typer.echo(
            f"{size} px: composing {composing * 1e3:.2f} ms an image, {rate:,.0f} a second and core; "
            f"encoding {encoding * 1e3:.1f} ms, {share:.1%} of it and the step"
        )


if __name__ == "__main__":
    typer.run(main)
