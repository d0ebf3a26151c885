"""Train the demonstration model: `python -m agentsd.demo.train --config configs/demo_model.yaml`."""

import json
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from diffusers import AutoencoderKL, StableDiffusionPipeline
from rich import print
from torch import Tensor
from transformers import CLIPTokenizer

from .accuracy import contact_sheet, generate
from .autoencoder import build_autoencoder, encode, psnr, to_pixels, train_autoencoder
from .config import DemoConfig, load_config
from .data import Reference, caption_of, load_references
from .diffusion import (
    DiffusionLoss,
    build_scheduler,
    build_text_encoder,
    build_tokenizer,
    build_unet,
    tokenize,
    train_diffusion,
)
from .guidance import soften_guidance
from .loop import CHECKPOINT, averaged_weights
from .pipeline_io import export_pipeline, load_pipeline

SHEET_PROMPTS = 32


@dataclass
class Recipe:
    """The stages of one run; each reads what the one before left in the run's folder."""

    config: DemoConfig
    references: list[Reference]

    @classmethod
    def of(cls, config: DemoConfig) -> "Recipe":
        """Check the concepts' names before anything is trained; an unknown one raises ValueError."""
        return cls(config, load_references(concepts=config.concepts))

    @property
    def device(self) -> torch.device:
        """The device that the run trains on."""
        return torch.device(self.config.device)

    def train_autoencoder(self) -> Any:
        """Return the AutoencoderKL: the start's, an earlier round's, or one trained now on every picture."""
        config, folder = self.config, self.config.run_dir / "autoencoder"
        if config.init_from is not None:
            start: Any = load_pipeline(folder=config.init_from, device=self.device)
            return start.vae
        if not (folder / "vae").exists():
            torch.manual_seed(config.seed)
            autoencoder = build_autoencoder(config.autoencoder).to(self.device)
            pixels = to_pixels([reference.image for reference in load_references(concepts="all")])
            train_autoencoder(
                autoencoder, pixels, config.autoencoder, folder, seed=config.seed, device=self.device
            )
            print(f"autoencoder: {psnr(autoencoder, pixels.to(self.device)):.2f} dB")
            autoencoder.save_pretrained(folder / "vae")
        trained: Any = AutoencoderKL.from_pretrained(folder / "vae")
        return trained.to(self.device)

    def tokenizer(self) -> CLIPTokenizer:
        """Return the run's tokenizer; it is kept, as learning it again may number the tokens differently."""
        folder = self.config.run_dir / "tokenizer"
        if not (folder / "tokenizer.json").exists():
            captions = sorted({reference.caption for reference in load_references(concepts="all")})
            build_tokenizer(captions, self.config.diffusion).save_pretrained(folder)
        return CLIPTokenizer.from_pretrained(folder)

    def build_pipeline(self, autoencoder: Any) -> Any:
        """Return a StableDiffusionPipeline with the start's or untrained weights around an autoencoder."""
        config = self.config
        pipe: Any
        if config.init_from is not None:
            pipe = load_pipeline(folder=config.init_from, device=self.device)
            pipe.vae = autoencoder
            return pipe
        torch.manual_seed(config.seed)
        tokenizer = self.tokenizer()
        size = autoencoder.config.sample_size // 2 ** (len(autoencoder.config.block_out_channels) - 1)
        pipe = StableDiffusionPipeline(
            vae=autoencoder,
            text_encoder=build_text_encoder(tokenizer, config.diffusion),
            tokenizer=tokenizer,
            unet=build_unet(config.diffusion, size),
            scheduler=build_scheduler(),
            safety_checker=None,
            feature_extractor=None,
            requires_safety_checker=False,
        )
        return pipe.to(self.device)

    def latents(self, autoencoder: Any, references: list[Reference]) -> Tensor:
        """Return scaled latents (2, N, 4, h, w) of pictures and their mirror images."""
        pixels = to_pixels([reference.image for reference in references]).to(self.device)
        both = [encode(autoencoder, flipped) for flipped in (pixels, pixels.flip(-1))]
        return torch.stack(both) * autoencoder.config.scaling_factor

    def train_diffusion(self, pipe: Any) -> None:
        """Train a pipeline's text encoder and U-Net on the pairs that aren't held out."""
        config = self.config
        seen = [reference for reference in self.references if reference.split == "seen"]
        folder = config.run_dir / "diffusion"
        prompts = [reference.caption for reference in self.references]
        prompts = prompts[:: max(1, len(prompts) // SHEET_PROMPTS)]

        def draw(step: int) -> None:
            contact_sheet(generate(pipe, prompts, steps=20)).save(folder / f"sheet_{step:06d}.png")

        train_diffusion(
            DiffusionLoss(pipe.unet, pipe.text_encoder, config.diffusion),
            self.latents(pipe.vae, seen),
            tokenize(pipe.tokenizer, [reference.caption for reference in seen]),
            tokenize(pipe.tokenizer, [caption_of(reference.concept, None) for reference in seen]),
            tokenize(pipe.tokenizer, [""]),
            config.diffusion,
            folder,
            seed=config.seed,
            device=self.device,
            draw=draw,
        )

    def soften_guidance(self, pipe: Any) -> None:
        """Distil a trained pipeline so that the usual guidance scale is the right one, if so configured."""
        config = self.config
        if config.guidance is None:
            return
        seen = [reference for reference in self.references if reference.split == "seen"]
        soften_guidance(
            DiffusionLoss(pipe.unet, pipe.text_encoder, config.diffusion),
            self.latents(pipe.vae, seen)[0],
            tokenize(pipe.tokenizer, [reference.caption for reference in seen]),
            tokenize(pipe.tokenizer, [""]),
            config.guidance,
            config.run_dir / "guidance",
            seed=config.seed,
            device=self.device,
        )

    def load_averaged(self, pipe: Any) -> None:
        """Put the last checkpoint's averaged weights in a pipeline, whether the run is over or not."""
        loss = DiffusionLoss(pipe.unet, pipe.text_encoder, self.config.diffusion)
        folder = self.config.run_dir / "guidance"
        if not (folder / CHECKPOINT).exists():
            folder = self.config.run_dir / "diffusion"
        averaged_weights(loss, folder, self.config.diffusion, self.device)

    def export(self, pipe: Any) -> None:
        """Write a pipeline where the package loads it from."""
        log = (self.config.run_dir / "diffusion" / "log.jsonl").read_text(encoding="utf-8").splitlines()
        training = {
            "concepts": sorted({reference.concept for reference in self.references}),
            "last": json.loads(log[-1]) if log else None,
            "recipe": self.config.model_dump(
                mode="json", exclude={"concepts", "run_dir", "export_dir", "init_from"}
            ),
        }
        export_pipeline(pipe, self.config.export_dir, training)
        print(f"exported to {self.config.export_dir}")


def main(
    config: Annotated[Path, typer.Option(help="YAML recipe; see configs/demo_model.yaml")],
    run_dir: Annotated[Path | None, typer.Option(help="overrides the recipe's run_dir")] = None,
    export_only: Annotated[bool, typer.Option(help="export the last checkpoint without training")] = False,
) -> None:
    """Train the autoencoder, then the text encoder and U-Net, then export; a repeated call resumes."""
    settings = load_config(config)
    if run_dir is not None:
        settings = settings.model_copy(update={"run_dir": run_dir})
    recipe = Recipe.of(settings)
    pipe = recipe.build_pipeline(recipe.train_autoencoder())
    if export_only:
        recipe.load_averaged(pipe)
    else:
        recipe.train_diffusion(pipe)
        recipe.soften_guidance(pipe)
    recipe.export(pipe)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # being ended saves a checkpoint too
    typer.run(main)
