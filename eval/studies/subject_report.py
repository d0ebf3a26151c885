"""The figures of a finetuned subject as rows, a note and one labelled image."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from PIL import Image

from ..images.sampling import Seconds
from ..images.store import Entry
from ..pages.grid import draw_grid
from ..pages.rows import Row
from ..pages.subject_table import LIKENESS, label_of
from ..quality import metrics
from ..table_settings import SubjectSettings
from .subject_plan import Figures, Variant, as_trained, baseline_of, specs_of, store_of
from .subject_scores import Scores

_COLUMNS, _TILE = 8, 96  # of the drawn grid
NO_SCORES = (
    "No score of likeness was measured: the field's are CLIP-I, CLIP-T and DINO, whose weights --clip and "
    "--dino name (a folder or a hub id, such as openai/clip-vit-base-patch32 and facebook/dino-vits16)."
)


def rows_of(
    variants: Sequence[Variant],
    figures: Mapping[Variant, Figures],
    settings: SubjectSettings,
    device: torch.device,
) -> list[Row]:
    """Return a row for each variant: means, standard errors, paired changes against `baseline_of` it,
    seconds."""
    entries = {variant: store_of(variant, settings).intact(variant.method) for variant in variants}
    rows = []
    for variant in variants:
        baseline = baseline_of(variant, variants)
        row: Row = {
            "variant": variant.name,
            "prior": variant.training.prior,
            "images": settings.images,
            "other_images": settings.other_prompts,
        }
        for name, values in figures[variant].items():
            row |= {name: float(values.mean()), f"{name}_error": metrics.standard_error(values)}
            if variant != baseline:
                change = values - figures[baseline][name]
                row[f"{name}_change"] = float(change.mean())
                row[f"{name}_change_error"] = metrics.standard_error(change)
        rows.append(row | _cost(entries[variant], entries[baseline], device))
    return rows


def _cost(ours: dict[int, Entry], baseline: dict[int, Entry], device: torch.device) -> Row:
    """Return median seconds an image, and the speed-up over images made in one session with baseline's."""
    ratios = [
        Seconds(baseline[i].seconds, baseline[i].cpu_seconds).charged(device)
        / Seconds(ours[i].seconds, ours[i].cpu_seconds).charged(device)
        for i in ours
        if baseline[i].session == ours[i].session
    ]
    return {
        "seconds": statistics.median(entry.seconds for entry in ours.values()),
        "cpu_seconds": statistics.median(entry.cpu_seconds for entry in ours.values()),
        "speedup": statistics.median(ratios) if ratios else None,
    }


def ceiling_row(ceiling: Mapping[str, float], views: int) -> Row:
    """Return the last row: the mean scores of two of so many views."""
    return {"variant": "the views among themselves", "images": views, **ceiling}


def note(views: int, scores: Scores) -> str:
    """Return what the figures are and how sure."""
    about = "; ".join(f"{score.title}: {score.about}" for score in scores.every)
    return (
        (f"{about}. The subject has {views} views. " if about else f"{NO_SCORES} ")
        + "generate-only: plain training, agents in so many of the steps and token merging in the rest; "
        "train+generate: agents in every step of both; prior: with prior preservation. change: against the "
        "baseline of equal prior preservation and seeds, ± half of a 95% interval; ≈ marks a change inside "
        "the noise, which is that of the images' seeds alone: each training ran once."
    )


def draw(
    variants: Sequence[Variant], views: Sequence[Path], rows: Sequence[Row], settings: SubjectSettings
) -> Image.Image:
    """Return the images as one labelled image: the views, then a row for each variant, a column a seed."""
    own = specs_of(settings)[0][:_COLUMNS]
    side = store_of(variants[0], settings).image(variants[0].method, own[0].index).height
    grid = [[as_trained(path, side) for path in views[: len(own)]]]
    labels = ["\n".join(["the subject's views", *_scores(rows[-1])])]
    for variant, row in zip(variants, rows, strict=False):
        store = store_of(variant, settings)
        grid.append([store.image(variant.method, spec.index) for spec in own])
        labels.append("\n".join([label_of(row), *_scores(row), f"{row['seconds']:.2f} s/image"]))
    return draw_grid(grid, labels, [f"seed {spec.seed}" for spec in own], _TILE)


def _scores(row: Row) -> list[str]:
    return [f"{title} {row[name]:.3f}" for name, title in LIKENESS.items() if name in row]
