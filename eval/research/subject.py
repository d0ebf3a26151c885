"""A subject taught to a model with DreamBooth, with and without agent attention (Fig. 8 in kind)."""

import hashlib
import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from rich.console import Console
from rich.progress import Progress

from agentsd.dreambooth.checkpoints import list_checkpoints
from agentsd.progress import progress

from ..environment import describe_environment
from ..errors import EvalError
from ..files import check_writable, save_image, write_bytes
from ..images.digest import parts_digest
from ..images.generate import Share, generate
from ..images.models import load_pipeline
from ..images.prompts import ImageSpec
from ..images.sampling import size_of
from ..images.store import Store
from ..pages import rows as results
from ..pages.grid import draw_grid
from .settings import SubjectSettings
from .subject_plan import TRAININGS, Variant, as_trained, specs_of, training_config, variants_of, views_of
from .subject_scores import Score, load_scores, rows_of, similarity, similarity_among
from .subject_table import label_of, note, tables_of

_COLUMNS, _TILE = 8, 96  # of the drawn grid


def command(settings: SubjectSettings, console: Console) -> None:
    """Train, generate and measure what isn't done yet; print the tables, and write `subject`.* in `out`.

    There is a row for each variant, and last the ceiling, the views among themselves.
    """
    check_writable(settings.out / "subject.jsonl")
    views, variants = views_of(settings), variants_of(settings)
    own, others = specs_of(settings)
    pipe = load_pipeline(settings)
    device, store = pipe.unet.device, Store(settings.out)
    scores = load_scores(settings, device)
    store.claim(_fingerprint(pipe, views, settings), describe_environment(device))
    with progress(console) as bars:
        for training in TRAININGS:
            train(training, settings, bars)
        unets = {training: _trained(pipe, training, settings) for training in TRAININGS}
        variants = [replace(variant, unet=unets.get(variant.weights)) for variant in variants]
        task = bars.add_task("images", total=len(variants) * (len(own) + len(others)))
        of_subject = settings.model_copy(update={"guidance_scale": settings.subject_guidance_scale})
        for specs, guided in ((own, of_subject), (others, settings)):
            generate(pipe, store, variants, specs, guided, Share(), partial(bars.advance, task))
    shown = [as_trained(path, size_of(pipe, settings)[0]) for path in views]
    figures, ceiling = measure(store, variants, shown, settings, scores)
    rows = rows_of(figures, store, settings, device)
    rows.append({"variant": "the views among themselves", "images": len(views), **ceiling})
    remarks = note(len(views), {score.name: score.about for score in scores})
    tables = tables_of(rows)
    remarks = "\n\n".join(filter(None, [remarks, store.mixture(rows)]))
    results.write_rows(settings.out, "subject", rows, tables, store.describe(settings, rows), remarks)
    grid = [images_of(store, variant, own[:_COLUMNS]) for variant in variants] + [
        shown[: len(own[:_COLUMNS])]
    ]
    seeds = [f"seed {spec.seed}" for spec in own[:_COLUMNS]]
    save_image(draw_grid(grid, [label_of(row) for row in rows], seeds, _TILE), settings.out / "subject.png")
    results.show(console, rows, tables, remarks, settings.out)


def _fingerprint(pipe: Any, views: Sequence[Path], settings: SubjectSettings) -> dict[str, Any]:
    """Return what every training and image depends on."""
    apart = {"out", "subject", "device", "clip", "dino", "batch_size"}
    return {
        **parts_digest(pipe),
        "views": hashlib.sha256(b"".join(path.read_bytes() for path in views)).hexdigest()[:16],
        "device": pipe.unet.device.type,
        **settings.model_dump(mode="json", exclude=apart),
    }


def train(training: str, settings: SubjectSettings, bars: Progress) -> None:
    """Finetune into `out`/<training>/model, from the newest checkpoint there; nothing if that is done."""
    done = settings.out / training / "trained.json"
    if done.exists():
        return
    from agentsd.dreambooth.training import Run

    bars.console.print(f"training: {training}")
    config = training_config(training, settings)
    try:
        Run(config, bars).train()
    except (OSError, ValueError) as error:
        raise EvalError(f"training {training}: {error}") from error
    write_bytes(done, config.model_dump_json(indent=1).encode())
    for checkpoint in list_checkpoints(config.output_dir):  # three times the model's size
        shutil.rmtree(checkpoint)


def _trained(pipe: Any, training: str, settings: SubjectSettings) -> Any:
    folder = settings.out / training / "model" / "unet"
    unet = type(pipe.unet).from_pretrained(folder, dtype=pipe.unet.dtype)
    return unet.to(pipe.unet.device).eval()


def measure(
    store: Store,
    variants: Sequence[Variant],
    views: Sequence[Image.Image],
    settings: SubjectSettings,
    scores: Sequence[Score],
) -> tuple[dict[Variant, dict[str, np.ndarray]], dict[str, float]]:
    """Return each variant's scores by name, one for each image, and the views' among themselves."""
    own, others = specs_of(settings)
    of_views = {score.name: score.features(views) for score in scores if score.features}
    figures: dict[Variant, dict[str, np.ndarray]] = {variant: {} for variant in variants}
    for variant, found in figures.items():
        for score in scores:
            if score.features:
                features = score.features(images_of(store, variant, own))
                found[score.name] = similarity(features, of_views[score.name])
            elif score.fit:
                found[score.name] = score.fit(images_of(store, variant, others), others)
    return figures, {name: similarity_among(features) for name, features in of_views.items()}


def images_of(store: Store, variant: Variant, specs: Sequence[ImageSpec]) -> list[Image.Image]:
    """Return a row's images."""
    return [store.image(variant, spec.index) for spec in specs]
