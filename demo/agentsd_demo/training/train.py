"""Train the demonstration model: `python -m agentsd_demo.training.train --config configs/demo_model.yaml`."""

import json
import random
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from diffusers import AutoencoderKL, StableDiffusionPipeline
from rich import print
from transformers import CLIPTokenizer

from ..data import SIZE, Reference, load_references
from ..pipeline_io import check_export, export_pipeline, load_pipeline
from ..scenes import random_scene, triples
from .accuracy import generate, image_grid
from .autoencoder import build_autoencoder, factor_of, inherit_weights, psnr, to_pixels, train_autoencoder
from .config import DemoConfig, load_config
from .diffusion import (
    DiffusionLoss,
    build_scheduler,
    build_text_encoder,
    build_tokenizer,
    build_unet,
    renew_embeddings,
    train_diffusion,
)
from .loop import LOG, averaged_weights

GRID_PROMPTS, GRID_SIZE = 32, SIZE


@dataclass
class Recipe:
    """The stages of one run; each reads what the one before left in the run's folder."""

    config: DemoConfig
    references: list[Reference]

    @classmethod
    def of(cls, config: DemoConfig) -> "Recipe":
        """Check before training.

        Raises ValueError for an unknown concept, for stages that may never begin, and where the export would
        replace a folder that is none.
        """
        check_export(config.export_dir)
        minutes = config.diffusion.max_minutes
        if minutes is not None and len(config.diffusion.stages) > 1:
            raise ValueError(
                f"max_minutes={minutes:g} may end the run before its last stage begins, as stages are shares "
                "of the steps: pass one stage of several sizes, or steps alone"
            )
        return cls(config, load_references(concepts=config.concepts))

    @property
    def device(self) -> torch.device:
        """The device that the run trains on."""
        return torch.device(self.config.device)

    def train_autoencoder(self) -> Any:
        """Return the AutoencoderKL: the start's, an earlier round's, or one trained now."""
        config, folder = self.config, self.config.run_dir / "autoencoder"
        if (folder / "vae").exists():
            trained: Any = AutoencoderKL.from_pretrained(folder / "vae")
            return trained.to(self.device)
        if config.autoencoder is None:
            return self.start().vae
        torch.manual_seed(config.seed)
        autoencoder, teacher = build_autoencoder(config.autoencoder).to(self.device), None
        if config.autoencoder.teacher is not None:
            taught: Any = load_pipeline(folder=config.autoencoder.teacher, device=self.device)
            teacher = taught.vae
            inherit_weights(autoencoder, teacher)
        trained, rare = triples(concepts=config.concepts), triples(concepts="all")
        train_autoencoder(
            autoencoder,
            teacher,
            trained,
            rare,
            config.autoencoder,
            folder,
            seed=config.seed,
            device=self.device,
        )
        fresh = to_pixels([random_scene(f"fresh/{i}", among=trained).image for i in range(128)])
        print(f"autoencoder: {psnr(autoencoder, fresh.to(self.device)):.2f} dB on fresh scenes")
        autoencoder.save_pretrained(folder / "vae")
        return autoencoder

    def start(self) -> Any:
        """Return the pipeline that the run starts from."""
        if self.config.init_from is None:
            raise ValueError("autoencoder: null needs init_from, a folder whose autoencoder is kept")
        return load_pipeline(folder=self.config.init_from, device=self.device)

    def tokenizer(self) -> CLIPTokenizer:
        """Return the run's tokenizer; it is kept, as learning it again may number the tokens differently."""
        folder = self.config.run_dir / "tokenizer"
        if not (folder / "tokenizer.json").exists():
            captions = sorted({triple.caption for triple in triples(concepts="all")})
            build_tokenizer(captions, self.config.diffusion).save_pretrained(folder)
        return CLIPTokenizer.from_pretrained(folder)

    def build_pipeline(self, autoencoder: Any) -> Any:
        """Return a StableDiffusionPipeline with the start's or untrained weights around an autoencoder."""
        config = self.config
        pipe: Any
        if config.init_from is not None:
            parts = self.start().components | {"vae": autoencoder}  # it may be of another factor
            pipe = StableDiffusionPipeline(**parts, requires_safety_checker=False)
            torch.manual_seed(config.seed)
            renew_embeddings(pipe.text_encoder, pipe.tokenizer, config.fresh_words)
            return pipe
        torch.manual_seed(config.seed)
        tokenizer = self.tokenizer()
        size = autoencoder.config.sample_size // factor_of(autoencoder)
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

    def train_diffusion(self, pipe: Any) -> None:
        """Train a pipeline's text encoder and U-Net on the scenes that aren't held out."""
        config = self.config
        folder = config.run_dir / "diffusion"
        every = triples(concepts=config.concepts)
        prompts = [triple.caption for triple in random.Random(0).sample(every, GRID_PROMPTS)]

        def draw(step: int) -> None:
            images = generate(pipe, prompts, steps=20, guidance=4.0, size=GRID_SIZE)
            image_grid(images).save(folder / f"grid_{step:06d}.png")

        train_diffusion(
            DiffusionLoss(pipe.unet, pipe.text_encoder, config.diffusion),
            pipe.vae,
            pipe.tokenizer,
            [triple for triple in every if triple.split == "seen"],
            config.diffusion,
            folder,
            seed=config.seed,
            device=self.device,
            draw=draw,
        )

    def load_averaged(self, pipe: Any) -> None:
        """Put the last checkpoint's averaged weights in a pipeline, whether the run is over or not."""
        loss = DiffusionLoss(pipe.unet, pipe.text_encoder, self.config.diffusion)
        averaged_weights(loss, self.config.run_dir / "diffusion", self.config.diffusion, self.device)

    def export(self, pipe: Any) -> None:
        """Write a pipeline where the package loads it from."""
        path = self.config.run_dir / "diffusion" / LOG
        log = (
            path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        )  # it may be interrupted early
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
    export_dir: Annotated[Path | None, typer.Option(help="overrides the recipe's export_dir")] = None,
    minutes: Annotated[float | None, typer.Option(help="overrides the recipe's max_minutes")] = None,
    bf16: Annotated[bool | None, typer.Option(help="overrides the recipe's bf16")] = None,
    export_only: Annotated[bool, typer.Option(help="export the last checkpoint without training")] = False,
) -> None:
    """Train the autoencoder, then the text encoder and U-Net, then export; a repeated call resumes."""
    settings = load_config(config)
    given = {"run_dir": run_dir, "export_dir": export_dir}
    settings = settings.model_copy(update={name: path for name, path in given.items() if path is not None})
    budget = {"max_minutes": minutes, "bf16": bf16}
    budget = {name: value for name, value in budget.items() if value is not None}
    settings = settings.model_copy(update={"diffusion": settings.diffusion.model_copy(update=budget)})
    recipe = Recipe.of(settings)
    pipe = recipe.build_pipeline(recipe.train_autoencoder())
    if export_only:
        recipe.load_averaged(pipe)
    else:
        recipe.train_diffusion(pipe)
    recipe.export(pipe)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # being ended saves a checkpoint too
    typer.run(main)
