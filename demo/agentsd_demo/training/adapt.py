"""Finetune the patched attention of the bundled toy model, the same short budget for each kind.

`python -m agentsd_demo.training.adapt FOLDER --attention focused` leaves a recipe and weights in FOLDER, for
`apply_agentsd(pipe, recipe=FOLDER)`. A repeated call resumes.
"""

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich import print

from agentsd.apply import apply_agentsd
from agentsd.attention import Downsample
from agentsd.modules import AgentModule, AttnZero, FocusedLinear
from agentsd.recipe import Phases, Recipe, Schedule

from ..data import SIZE
from ..pipeline_io import load_pipeline
from ..scenes import triples
from .config import DiffusionConfig, Stage
from .diffusion import DiffusionLoss, train_diffusion

KINDS: dict[str, Callable[[], Schedule]] = {
    "module": AgentModule,
    "module-without-bias": lambda: AgentModule(bias=False),
    "module-without-convolution": lambda: AgentModule(convolution=False),
    "focused": FocusedLinear,
    "attnzero": AttnZero,
    "baseline": lambda: Phases(None, Downsample(), early_frac=1.0),  # in every step; for comparison
}


def adapt(folder: Path, recipe: Recipe, budget: DiffusionConfig, seed: int = 0, device: str = "cpu") -> None:
    """Train the patched layers' projections and modules, and nothing else, on scenes that aren't held out."""
    pipe: Any = load_pipeline(device=device)
    pipe.unet.requires_grad_(False)
    pipe.text_encoder.requires_grad_(False)
    handle = apply_agentsd(pipe, recipe=recipe)
    for weight in handle.parameters():
        weight.requires_grad_(True)
    train_diffusion(
        DiffusionLoss(pipe.unet, pipe.text_encoder, budget),
        pipe.vae,
        pipe.tokenizer,
        triples("seen"),
        budget,
        folder / "training",
        seed=seed,
        device=torch.device(device),
    )
    handle.save(folder)


def main(
    folder: Annotated[Path, typer.Argument(help="where recipe, weights and checkpoints go")],
    attention: Annotated[str, typer.Option(help="one of " + ", ".join(KINDS))] = "module",
    levels: Annotated[int, typer.Option(help="attention levels, from the finest one")] = 1,
    size: Annotated[int, typer.Option(help="canvas of the training scenes, pixels")] = SIZE,
    steps: Annotated[int, typer.Option(help="training steps")] = 1000,
    batch: Annotated[int, typer.Option(help="images a step")] = 8,
    lr: Annotated[float, typer.Option(help="learning rate, with a warm-up and a cosine to 0")] = 2e-4,
    device: Annotated[str, typer.Option(help="cpu, cuda ...")] = "cpu",
) -> None:
    """Finetune one kind of attention in every step, or full attention for comparison."""
    if attention not in KINDS:
        raise typer.BadParameter(f"{attention!r}: choose one of {', '.join(KINDS)}", param_hint="--attention")
    recipe = Recipe(KINDS[attention](), levels=levels)
    # The text encoder is frozen, so what a style does to its words is no matter of this training.
    budget = DiffusionConfig(
        steps=steps,
        batch=batch,
        lr=lr,
        warmup=50,
        compile=False,
        leak_weight=0,
        stages=(Stage(until=1.0, sizes={size: 1.0}),),
    )
    adapt(folder, recipe, budget, device=device)
    print(f"saved to {folder}")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # being ended saves a checkpoint too
    typer.run(main)
