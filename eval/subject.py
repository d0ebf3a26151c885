"""A subject taught to a model with DreamBooth, with and without agent attention (Fig. 8 in kind)."""

import hashlib
import shutil
import statistics
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from agentsd import AgentConfig
from agentsd.demo import SUBJECT, load_references
from agentsd.dreambooth import DreamBoothConfig
from agentsd.dreambooth.checkpoints import list_checkpoints
from agentsd.dreambooth.data import find_pictures, load_picture

from . import metrics, results
from .config import SubjectSettings
from .errors import EvalError
from .features import features_of, load_network
from .grid import draw_grid
from .methods import Method, parse_method
from .models import load_pipeline
from .output import check_writable, progress, save_image, write_bytes
from .pictures import Picture, from_references
from .results import Column, Row, figure
from .sampling import Seconds, sample, size_of
from .store import Entry, Store, weights_digest
from .table import change

_COLUMNS, _TILE = 8, 96  # of the drawn grid


@dataclass(frozen=True)
class Training:
    """How the weights of a row came about."""

    apply: str | None
    """As `DreamBoothConfig.apply`; None is the model before finetuning."""
    prior: bool = False

    @property
    def key(self) -> str:
        """The name of its folder."""
        kind = "before" if self.apply is None else "stock" if self.apply == "none" else "agents"
        return f"{kind}-prior" if self.prior else kind


@dataclass(frozen=True)
class Variant:
    """A row: weights, and how they generate."""

    training: Training
    method: Method
    name: str
    """Where agents run; the same without and with prior preservation."""


@dataclass(frozen=True)
class Figures:
    """What is measured for each picture of a row, in the order of the seeds.

    Attributes:
        similarity: (N,) mean cosine to the views, of the subject's pictures.
        right: (M,) 1 where another prompt's picture shows what was asked for, else 0.
    """

    similarity: np.ndarray
    right: np.ndarray


TRAININGS = tuple(Training(apply, prior) for prior in (False, True) for apply in ("none", "train+generate"))


def training_config(training: Training, settings: SubjectSettings) -> DreamBoothConfig:
    """Return the settings of a finetuning: `settings`, and the paper's (appendix B.4) for the rest."""
    return DreamBoothConfig.model_validate(
        {
            "pretrained_model_name_or_path": settings.model,
            "instance_data_dir": views_folder(settings),
            "instance_prompt": settings.instance_prompt,
            "with_prior_preservation": training.prior,
            "class_data_dir": settings.out / "classes",
            "class_prompt": settings.class_prompt,
            "num_class_images": settings.class_images,
            "output_dir": settings.out / training.key / "model",
            "max_train_steps": settings.train_steps,
            "learning_rate": settings.learning_rate,
            "lr_scheduler": settings.lr_scheduler,
            "use_8bit_adam": False,  # the same optimizer on every device
            "seed": settings.seed,
            "checkpointing_steps": 100,
            "checkpoints_total_limit": 1,
            "resume_from_checkpoint": "latest",
            "num_validation_images": 1,
            "num_inference_steps": settings.steps,
            "guidance_scale": settings.guidance_scale,
            "report_to": None,
            "ratio": settings.ratio,
            "apply": training.apply,
            **settings.agent,
        }
    )


def variants_of(settings: SubjectSettings) -> list[Variant]:
    """Return the rows: the model as it came, then those of Fig. 8, without and with prior preservation."""
    every = training_config(TRAININGS[0], settings).agent
    stock = parse_method("stock", None, settings)

    def agents(share: float) -> Method:
        agent = {"k": every.k, "scale": every.scale, "cells": every.cells, "early_frac": share}
        return parse_method("agentsd", every.ratio, settings.model_copy(update={"agent": agent}))

    rows = [Variant(Training(None), stock, "before finetuning")]
    for training in TRAININGS:
        if training.apply == "none":
            rows.append(Variant(training, stock, "stock"))
            for share in (AgentConfig.early_frac, every.early_frac):
                rows.append(Variant(training, agents(share), f"generate-only {share:.0%}"))
        else:
            rows.append(Variant(training, agents(every.early_frac), "train+generate"))
    return rows


def views_folder(settings: SubjectSettings) -> Path:
    """Return the folder of the subject's pictures."""
    return settings.subject or SUBJECT


def views_of(settings: SubjectSettings) -> list[Path]:
    """Return the subject's pictures. Raises EvalError if one can't be read or there are fewer than 2."""
    try:
        paths = find_pictures(views_folder(settings))
    except ValueError as error:
        raise EvalError(f"subject: {error}") from error
    if len(paths) < 2:
        raise EvalError(f"subject: {views_folder(settings)} holds 1 picture; 2 views or more can be compared")
    return paths


def pictures_of(settings: SubjectSettings) -> tuple[list[Picture], list[Picture]]:
    """Return the subject's pictures, and those of other prompts: captions that the model was trained on."""
    own = [Picture(i, settings.instance_prompt, settings.seed + i) for i in range(settings.images)]
    seen = [reference for reference in load_references() if reference.split == "seen"]
    others = from_references(seen, settings.other_prompts, settings.seed + len(own))
    return own, [replace(picture, index=len(own) + picture.index) for picture in others]


def run(settings: SubjectSettings, console: Console) -> tuple[list[Row], list[str]]:
    """Train, generate and judge what isn't done yet, and write `subject`.jsonl, .csv, .md and .png in `out`.

    Returns a row for each variant and last the ceiling (the views among themselves), and what to say of them.
    Raises EvalError for settings, a folder or a model that won't do.
    """
    check_writable(settings.out / "subject.jsonl")
    views, variants = views_of(settings), variants_of(settings)
    own, others = pictures_of(settings)
    pipe = load_pipeline(settings)
    if "clip_sample" in pipe.scheduler.config:  # diffusers' DDIM does, but a latent is not bound to [-1, 1]
        pipe.scheduler.register_to_config(clip_sample=False)
    Store(settings.out).claim(_fingerprint(pipe, views, settings))
    with progress(console) as bars:
        for training in TRAININGS:
            train(training, settings, bars)
        task = bars.add_task("pictures", total=len(variants) * (settings.images + settings.other_prompts))
        generate(pipe, variants, [*own, *others], settings, lambda: bars.advance(task))
    figures, ceiling = judge(pipe, variants, views, settings)
    rows = [*rows_of(variants, figures, settings, pipe.unet.device), _ceiling_row(ceiling, len(views))]
    facts = results.describe_run(settings, pipe.unet.device)
    told = [*sentences(variants, figures), note(len(views))]
    tables = list(tables_of().values())
    results.write_rows(settings.out, "subject", rows, tables, facts, "\n\n".join(told))
    save_image(draw(variants, views, rows, settings), settings.out / "subject.png")
    return rows, told


def _fingerprint(pipe: Any, views: Sequence[Path], settings: SubjectSettings) -> dict[str, Any]:
    """Return what every training and picture depends on."""
    return {
        "weights": weights_digest(pipe.unet),
        "views": hashlib.sha256(b"".join(path.read_bytes() for path in views)).hexdigest()[:16],
        "device": pipe.unet.device.type,
        **settings.model_dump(mode="json", exclude={"out", "subject", "device"}),
    }


def train(training: Training, settings: SubjectSettings, bars: Progress) -> None:
    """Finetune into `out`/<training>/model, from the newest checkpoint there; nothing if that is done."""
    folder = settings.out / training.key
    if (folder / "trained.json").exists():
        return
    from agentsd.dreambooth.training import Run

    bars.console.print(f"training: {training.key}")
    config = training_config(training, settings)
    try:
        Run(config, bars).train()
    except (OSError, ValueError) as error:
        raise EvalError(f"training {training.key}: {error}") from error
    write_bytes(folder / "trained.json", config.model_dump_json(indent=1).encode())
    for checkpoint in list_checkpoints(config.output_dir):  # three times the model's size
        shutil.rmtree(checkpoint)


def generate(
    pipe: Any,
    variants: Sequence[Variant],
    pictures: Sequence[Picture],
    settings: SubjectSettings,
    tick: Callable[[], None],
) -> None:
    """Make every picture that isn't on disk, unharmed, already; the rows take turns at each, for their times.

    The pipeline's U-Net is its own again afterwards. `tick` is called for each row's picture.
    """
    unets = {variant.training: pipe.unet for variant in variants}
    for training in TRAININGS:
        folder = settings.out / training.key / "model" / "unet"
        unet = type(pipe.unet).from_pretrained(folder, dtype=pipe.unet.dtype)
        unets[training] = unet.to(pipe.unet.device).eval()
    done = {variant: _store(variant, settings).intact(variant.method) for variant in variants}
    session, warm = uuid.uuid4().hex[:12], set()
    own = settings.model_copy(update={"guidance_scale": settings.subject_guidance_scale})
    try:
        for picture in pictures:
            guided = own if picture.concept is None else settings
            for variant in variants:
                if picture.index not in done[variant]:
                    pipe.unet = unets[variant.training]
                    if variant not in warm:
                        sample(pipe, variant.method, [picture], guided, steps=min(settings.steps, 2))
                        warm.add(variant)
                    images, seconds = sample(pipe, variant.method, [picture], guided)
                    store = _store(variant, settings)
                    store.save(variant.method, picture.index, [picture], images, seconds, session)
                tick()
    finally:
        pipe.unet = unets[Training(None)]


def _store(variant: Variant, settings: SubjectSettings) -> Store:
    return Store(settings.out / variant.training.key)


def judge(
    pipe: Any, variants: Sequence[Variant], views: Sequence[Path], settings: SubjectSettings
) -> tuple[dict[Variant, Figures], float]:
    """Return each row's figures, and the mean similarity of two views: more can't be asked for."""
    own, others = pictures_of(settings)
    network = load_network("efficientnet-lite0", pipe.unet.device)
    cache = settings.out / "features"
    shown = [_as_trained(path, size_of(pipe, settings)[0]) for path in views]
    of_views = features_of(network, shown, cache)
    references = load_references()
    of_references = features_of(network, [reference.image for reference in references], cache)
    figures = {}
    for variant in variants:
        store = _store(variant, settings)
        paths = [store.path(variant.method, picture.index) for picture in (*own, *others)]
        found = features_of(network, paths, cache)
        nearest = metrics.nearest(found[len(own) :], of_references)
        right = [references[i].concept == picture.concept for i, picture in zip(nearest, others, strict=True)]
        figures[variant] = Figures(similarity(found[: len(own)], of_views), np.array(right, dtype=float))
    return figures, similarity_among(of_views)


def _as_trained(path: Path, side: int) -> Image.Image:
    """Return a view as the training sees it: its centre square, on white."""
    pixels = (load_picture(path, side) + 1) * 127.5
    return Image.fromarray(pixels.round().byte().permute(1, 2, 0).numpy())


def similarity(features: np.ndarray, views: np.ndarray) -> np.ndarray:
    """Return for each of features (N, D) its mean cosine to the views' features (V, D), (N,)."""
    return (metrics.unit(features) @ metrics.unit(views).T).mean(axis=1)


def similarity_among(views: np.ndarray) -> float:
    """Return the mean cosine of two different rows of features (V, D), V at least 2."""
    rows = metrics.unit(views)
    count = len(rows)
    return float(((rows @ rows.T).sum() - count) / (count * (count - 1)))


def baseline(variant: Variant, variants: Sequence[Variant]) -> Variant:
    """Return the row to compare with: the row "stock" of the same prior."""
    training = Training("none", variant.training.prior)
    return next(v for v in variants if v.training == training and not v.method.parts)


def rows_of(
    variants: Sequence[Variant],
    figures: Mapping[Variant, Figures],
    settings: SubjectSettings,
    device: torch.device,
) -> list[Row]:
    """Return a row for each variant: means, standard errors, paired changes against `baseline`, seconds."""
    entries = {variant: _store(variant, settings).intact(variant.method) for variant in variants}
    rows = []
    for variant in variants:
        stock = baseline(variant, variants)
        row: Row = {
            "variant": variant.name,
            "prior": variant.training.prior,
            "images": settings.images,
            "other_images": settings.other_prompts,
        }
        for name in ("similarity", "right"):
            values, theirs = getattr(figures[variant], name), getattr(figures[stock], name)
            row |= {name: float(values.mean()), f"{name}_error": metrics.standard_error(values)}
            if variant != stock:
                row[f"{name}_change"] = float((values - theirs).mean())
                row[f"{name}_change_error"] = metrics.standard_error(values - theirs)
        rows.append(row | _cost(entries[variant], entries[stock], device))
    return rows


def _cost(ours: dict[int, Entry], stock: dict[int, Entry], device: torch.device) -> Row:
    """Return median seconds a picture, and the speed-up over pictures made in one session with stock's."""
    ratios = [
        Seconds(stock[i].seconds, stock[i].cpu_seconds).charged(device)
        / Seconds(ours[i].seconds, ours[i].cpu_seconds).charged(device)
        for i in ours
        if stock[i].session == ours[i].session
    ]
    return {
        "seconds": statistics.median(entry.seconds for entry in ours.values()),
        "cpu_seconds": statistics.median(entry.cpu_seconds for entry in ours.values()),
        "speedup": statistics.median(ratios) if ratios else None,
    }


def _ceiling_row(ceiling: float, views: int) -> Row:
    return {"variant": "the views among themselves", "images": views, "similarity": ceiling}


def _label(row: Row) -> str:
    return row["variant"] + (", prior" if row.get("prior") else "")


def tables_of() -> dict[str, list[Column]]:
    """Return the columns of each table by its title."""
    first = Column("variant", _label)
    return {
        "the subject": [
            first,
            Column("similarity ± s.e.", _with_error("similarity", ".3f")),
            Column("change", change("similarity", ".3f")),
        ],
        "other prompts": [
            first,
            Column("right ± s.e.", _with_error("right", ".1%")),
            Column("change", change("right", ".1%")),
        ],
        "cost": [
            first,
            Column("s/img", figure("seconds", ".2f")),
            Column("CPU s/img", figure("cpu_seconds", ".2f")),
            Column("speed-up", figure("speedup", ".2f")),
        ],
    }


def _with_error(key: str, form: str) -> Callable[[Row], str]:
    def text(row: Row) -> str:
        value, error = row.get(key), row.get(f"{key}_error")
        if value is None:
            return "-"
        return format(value, form) + (f" ± {format(error, form)}" if error is not None else "")

    return text


def summary(rows: Sequence[Row]) -> list[Table]:
    """Return the figures as terminal tables."""
    return [results.to_terminal(title, rows, columns) for title, columns in tables_of().items()]


def note(views: int) -> str:
    """Return what the figures are and how sure."""
    return (
        f"similarity: mean cosine of EfficientNet-Lite0 features to the subject's {views} views; right: the "
        "nearest reference is of the prompted concept. generate-only: stock training, agents in so many of "
        "the steps and token merging in the rest; train+generate: agents in every step of both; prior: with "
        "prior preservation. change: against stock with the same prior preservation, same seeds, ± half of a "
        "95% interval; ≈ marks a change inside the noise, which is that of the pictures' seeds alone: each "
        "training ran once."
    )


def sentences(variants: Sequence[Variant], figures: Mapping[Variant, Figures]) -> list[str]:
    """Return the ordering of the rows by similarity and by accuracy, without and with prior preservation."""
    titles = {"similarity": "Subject similarity", "right": "Other prompts right"}
    told = []
    for name, title in titles.items():
        groups = []
        for prior in (False, True):
            group = [v for v in variants if v.training.prior == prior or v.training.apply is None]
            values = {v.name: getattr(figures[v], name) for v in group}
            groups.append(f"{'with it' if prior else 'without prior preservation'}: {ordering(values)}")
        told.append(f"{title}, greatest first (> beyond the noise, ≈ inside it), {'; '.join(groups)}.")
    return told


def ordering(values: Mapping[str, np.ndarray]) -> str:
    """Return names with their means, greatest first, and between neighbours ">" or "≈".

    `values` are figures (N,) for the same N seeds, at least 2; ">" stands where the paired difference of the
    neighbours is beyond half of its 95% interval.
    """
    names = sorted(values, key=lambda name: -values[name].mean())
    text = ""
    for before, name in zip([None, *names], names, strict=False):
        if before is not None:
            difference = values[before] - values[name]
            beyond = difference.mean() > metrics.Z95 * metrics.standard_error(difference)
            text += " > " if beyond else " ≈ "
        text += f"{name} ({values[name].mean():.3f})"
    return text


def draw(
    variants: Sequence[Variant], views: Sequence[Path], rows: Sequence[Row], settings: SubjectSettings
) -> Image.Image:
    """Return the pictures as one labelled image: the views, then a row for each variant, a column a seed."""
    own = pictures_of(settings)[0][:_COLUMNS]
    side = _store(variants[0], settings).image(variants[0].method, own[0].index).height
    grid = [[_as_trained(path, side) for path in views[: len(own)]]]
    labels = [f"the subject's views\n{rows[-1]['similarity']:.3f} among themselves"]
    for variant, row in zip(variants, rows, strict=False):
        store = _store(variant, settings)
        grid.append([store.image(variant.method, picture.index) for picture in own])
        labels.append(f"{_label(row)}\n{row['similarity']:.3f}, {row['seconds']:.2f} s/image")
    return draw_grid(grid, labels, [f"seed {picture.seed}" for picture in own], _TILE)
