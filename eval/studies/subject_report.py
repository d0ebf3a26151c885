"""The figures of a finetuned subject as rows, sentences and one labelled image."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from rich.table import Table

from ..images.sampling import Seconds
from ..images.store import Entry
from ..pages import rows as results
from ..pages.grid import draw_grid
from ..pages.quality_table import FEWEST, TOO_FEW, change
from ..pages.rows import Column, Row, figure
from ..quality import metrics
from ..settings import SubjectSettings
from .subject_plan import Figures, Variant, as_trained, baseline_of, specs_of, store_of
from .subject_scores import Fit, Likeness, Scores

_COLUMNS, _TILE = 8, 96  # of the drawn grid


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
            theirs = figures[baseline][name]
            row |= {name: float(values.mean()), f"{name}_error": metrics.standard_error(values)}
            if variant != baseline:
                row[f"{name}_change"] = float((values - theirs).mean())
                row[f"{name}_change_error"] = metrics.standard_error(values - theirs)
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


def _label(row: Row) -> str:
    return row["variant"] + (", prior" if row.get("prior") else "")


def tables_of(scores: Scores) -> dict[str, list[Column]]:
    """Return the columns of each table by its title."""
    tables = {
        "the subject": [column for score in scores.likeness for column in _columns(score, "images")],
        "other prompts": [column for score in scores.fit for column in _columns(score, "other_images")],
        "cost": [
            Column("s/img", figure("seconds", ".2f")),
            Column("CPU s/img", figure("cpu_seconds", ".2f")),
            Column("speed-up", figure("speedup", ".2f")),
        ],
    }
    first = Column("variant", _label)
    return {title: [first, *columns] for title, columns in tables.items() if columns}


def _columns(score: Likeness | Fit, count: str) -> list[Column]:
    return [
        Column(f"{score.title} ± s.e.", _with_error(score.name, score.form)),
        Column("change", change(score.name, score.form, count=count)),
    ]


def _with_error(key: str, form: str) -> Callable[[Row], str]:
    def text(row: Row) -> str:
        value, error = row.get(key), row.get(f"{key}_error")
        if value is None:
            return "-"
        return format(value, form) + (f" ± {format(error, form)}" if error is not None else "")

    return text


def summary(rows: Sequence[Row], scores: Scores) -> list[Table]:
    """Return the figures as terminal tables."""
    return [results.to_terminal(title, rows, columns) for title, columns in tables_of(scores).items()]


NO_SCORES = (
    "No score of likeness was measured: the field's are CLIP-I, CLIP-T and DINO, whose weights --clip and "
    "--dino name (a folder or a hub id, such as openai/clip-vit-base-patch32 and facebook/dino-vits16)."
)


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


def sentences(variants: Sequence[Variant], figures: Mapping[Variant, Figures], scores: Scores) -> list[str]:
    """Return the ordering of the rows by each score, without and with prior preservation."""
    told = []
    for score in scores.every:
        groups = []
        for prior in (False, True):
            group = [v for v in variants if v.training.prior == prior or v.training.apply is None]
            values = {v.name: figures[v][score.name] for v in group}
            groups.append(f"{'with it' if prior else 'without prior preservation'}: {ordering(values)}")
        count = len(next(iter(figures.values()))[score.name])
        signs = "> beyond the noise, ≈ inside it" if count >= FEWEST else f"{count} are {TOO_FEW}"
        what = "of the subject" if isinstance(score, Likeness) else "of other prompts"
        told.append(f"{score.title} {what}, greatest first ({signs}), {'; '.join(groups)}.")
    return told


def ordering(values: Mapping[str, np.ndarray]) -> str:
    """Return names with their means, greatest first, and between neighbours ">" or "≈".

    `values` are figures (N,) for the same N seeds; ">" stands where the paired difference of the neighbours
    is beyond half of its 95% interval, and neither sign where N is below 30.
    """
    names = sorted(values, key=lambda name: -values[name].mean())
    text = ""
    for before, name in zip([None, *names], names, strict=False):
        if before is not None:
            difference = values[before] - values[name]
            if len(difference) < FEWEST:
                text += ", "
            else:
                beyond = difference.mean() > metrics.Z95 * metrics.standard_error(difference)
                text += " > " if beyond else " ≈ "
        text += f"{name} ({values[name].mean():.3f})"
    return text


def draw(
    variants: Sequence[Variant],
    views: Sequence[Path],
    rows: Sequence[Row],
    settings: SubjectSettings,
    scores: Scores,
) -> Image.Image:
    """Return the images as one labelled image: the views, then a row for each variant, a column a seed."""
    own = specs_of(settings)[0][:_COLUMNS]
    side = store_of(variants[0], settings).image(variants[0].method, own[0].index).height
    grid = [[as_trained(path, side) for path in views[: len(own)]]]
    labels = ["\n".join(["the subject's views", *_told(rows[-1], scores)])]
    for variant, row in zip(variants, rows, strict=False):
        store = store_of(variant, settings)
        grid.append([store.image(variant.method, spec.index) for spec in own])
        labels.append("\n".join([_label(row), *_told(row, scores), f"{row['seconds']:.2f} s/image"]))
    return draw_grid(grid, labels, [f"seed {spec.seed}" for spec in own], _TILE)


def _told(row: Row, scores: Scores) -> list[str]:
    return [f"{score.title} {row[score.name]:.3f}" for score in scores.likeness]
