"""A subject taught to a model with DreamBooth, with and without agent attention (Fig. 8 in kind)."""

import hashlib
import shutil
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from rich.console import Console
from rich.progress import Progress

from agentsd.dreambooth.checkpoints import list_checkpoints

from ..environment import describe_environment, describe_run
from ..errors import EvalError
from ..files import check_writable, save_image, write_bytes
from ..images.digest import weights_digest
from ..images.models import load_pipeline
from ..images.prompts import ImageSpec
from ..images.sampling import sample, size_of, warm_up
from ..images.store import Store
from ..pages import rows as results
from ..pages.grid import draw_grid
from ..pages.rows import Row, progress
from ..pages.subject_table import label_of, note, tables_of
from ..settings import SubjectSettings
from .subject_plan import TRAININGS, Variant, as_trained, specs_of, training_config, variants_of, views_of
from .subject_scores import Score, load_scores, rows_of, similarity, similarity_among

_COLUMNS, _TILE = 8, 96  # of the drawn grid


def command(settings: SubjectSettings, console: Console) -> None:
    """Train, generate and measure what isn't done yet; print the tables, and write `subject`.* in `out`.

    There is a row for each variant, and last the ceiling, the views among themselves.
    """
    check_writable(settings.out / "subject.jsonl")
    views, variants = views_of(settings), variants_of(settings)
    own, others = specs_of(settings)
    pipe = load_pipeline(settings)
    scores = load_scores(settings, pipe.unet.device)
    Store(settings.out).claim(_fingerprint(pipe, views, settings), describe_environment(pipe.unet.device))
    with progress(console) as bars:
        for training in TRAININGS:
            train(training, settings, bars)
        task = bars.add_task("images", total=len(variants) * (settings.images + settings.other_prompts))
        generate(pipe, variants, [*own, *others], settings, lambda: bars.advance(task))
    figures, ceiling = measure(pipe, variants, views, settings, scores)
    rows = rows_of(figures, settings, pipe.unet.device)
    rows.append({"variant": "the views among themselves", "images": len(views), **ceiling})
    facts = describe_run(settings, pipe.unet.device)
    remarks = note(len(views), {score.name: score.about for score in scores})
    tables = tables_of(rows)
    results.write_rows(settings.out, "subject", rows, list(tables.values()), facts, remarks)
    save_image(draw(variants, views, rows, settings), settings.out / "subject.png")
    for title, columns in tables.items():
        console.print(results.to_terminal(title, rows, columns))
    console.print(remarks)
    console.print(f"images and figures: {settings.out}", soft_wrap=True)


def _fingerprint(pipe: Any, views: Sequence[Path], settings: SubjectSettings) -> dict[str, Any]:
    """Return what every training and image depends on."""
    return {
        "weights": weights_digest(pipe.unet),
        "views": hashlib.sha256(b"".join(path.read_bytes() for path in views)).hexdigest()[:16],
        "device": pipe.unet.device.type,
        **settings.model_dump(mode="json", exclude={"out", "subject", "device", "clip", "dino"}),
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


def generate(
    pipe: Any,
    variants: Sequence[Variant],
    specs: Sequence[ImageSpec],
    settings: SubjectSettings,
    report: Callable[[], None],
) -> None:
    """Make every image that isn't on disk, unharmed, already; the rows take turns at each, for their times.

    The pipeline's U-Net is its own again afterwards. `report` is called for each row's image.
    """
    unets = {"before": pipe.unet}
    for training in TRAININGS:
        folder = settings.out / training / "model" / "unet"
        unet = type(pipe.unet).from_pretrained(folder, dtype=pipe.unet.dtype)
        unets[training] = unet.to(pipe.unet.device).eval()
    done = {variant: variant.store(settings).intact(variant.method) for variant in variants}
    session, warm = uuid.uuid4().hex[:12], set()
    own = settings.model_copy(update={"guidance_scale": settings.subject_guidance_scale})
    try:
        for spec in specs:
            guided = own if spec.index < settings.images else settings
            for variant in variants:
                report()
                if spec.index in done[variant]:
                    continue
                pipe.unet = unets[variant.weights]
                if variant not in warm:
                    warm_up(pipe, variant.method, [spec], guided)
                    warm.add(variant)
                images, seconds = sample(pipe, variant.method, [spec], guided)
                variant.store(settings).save(variant.method, spec.index, [spec], images, seconds, session)
    finally:
        pipe.unet = unets["before"]


def measure(
    pipe: Any,
    variants: Sequence[Variant],
    views: Sequence[Path],
    settings: SubjectSettings,
    scores: Sequence[Score],
) -> tuple[dict[Variant, dict[str, np.ndarray]], dict[str, float]]:
    """Return each variant's scores by name, one for each image, and the views' among themselves."""
    own, others = specs_of(settings)
    shown = [as_trained(path, size_of(pipe, settings)[0]) for path in views]
    of_views = {score.name: score.features(shown) for score in scores if score.features}
    figures: dict[Variant, dict[str, np.ndarray]] = {variant: {} for variant in variants}
    for variant, found in figures.items():
        for score in scores:
            asked = own if score.features else others
            images = images_of(variant, asked, settings)
            if score.features:
                found[score.name] = similarity(score.features(images), of_views[score.name])
            elif score.fit:
                found[score.name] = score.fit(images, asked)
    return figures, {name: similarity_among(features) for name, features in of_views.items()}


def images_of(variant: Variant, specs: Sequence[ImageSpec], settings: SubjectSettings) -> list[Image.Image]:
    """Return a row's images."""
    return [variant.store(settings).image(variant.method, spec.index) for spec in specs]


def draw(
    variants: Sequence[Variant], views: Sequence[Path], rows: Sequence[Row], settings: SubjectSettings
) -> Image.Image:
    """Return the images as one labelled image: a row for each variant, then the views, a column a seed."""
    own = specs_of(settings)[0][:_COLUMNS]
    grid = [images_of(variant, own, settings) for variant in variants]
    grid.append([as_trained(path, grid[0][0].height) for path in views[: len(own)]])
    return draw_grid(grid, [label_of(row) for row in rows], [f"seed {spec.seed}" for spec in own], _TILE)
