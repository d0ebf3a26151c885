"""High-frequency energy, and the position, size and style of the toy model's sprites, of a table's images."""

import csv
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from agentsd_demo.data import trained_concepts
from agentsd_demo.reading import Box, read_scene
from agentsd_demo.scenes import triples
from PIL import Image
from rich.console import Console

from ..environment import describe_run
from ..errors import EvalError
from ..pages import rows as results
from ..pages.rows import Column, Row, figure
from ..quality.scenes import fresh_scenes, scene_reader
from .settings import DetailsSettings

_LUMA = np.array([0.299, 0.587, 0.114])
_FRESH = 1000
COLUMNS = [
    Column("method", figure("label", "")),
    Column("high-frequency energy / baseline's", figure("high_frequency", ".3f")),
    Column("position, px", figure("position", ".2f")),
    Column("size, px", figure("size", ".2f")),
    Column("right style", figure("right_style", ".1%")),
]
NOTE = (
    "High-frequency energy is a geometric mean over the seeds. Position and size are 1-Wasserstein "
    "distances to fresh scenes."
)


def command(settings: DetailsSettings, console: Console) -> None:
    """Print the table, and write it into the run's folder."""
    rows = measure(settings.folder)
    run = describe_run(settings, torch.device("cpu"))
    results.write_rows(settings.folder, "details", rows, [COLUMNS], run, NOTE)
    console.print(results.to_terminal("details", rows, COLUMNS))
    console.print(NOTE)


def measure(folder: Path) -> list[Row]:
    """Return a row for each method of a table. Raises EvalError without its images."""
    try:
        lines = (folder / "table.jsonl").read_text(encoding="utf-8").splitlines()
        with (folder / "table-images.csv").open(encoding="utf-8", newline="") as file:
            singles = list(csv.DictReader(file))
    except OSError:
        raise EvalError(f"{folder} holds no table; run agentsd-eval table --out {folder}") from None
    asked = {triple.caption: triple for triple in triples()}
    reader = scene_reader(torch.device("cpu"))
    rows: list[Row] = []
    energies: dict[str, np.ndarray] = {}
    fresh: np.ndarray | None = None
    for row in filter(lambda row: row.get("key"), map(json.loads, lines)):
        own = [single for single in singles if single["method"] == row["key"]]
        paths = [folder / "images" / row["key"] / f"{int(single['index']):05d}.png" for single in own]
        if not own or not all(path.exists() for path in paths):
            raise EvalError(f"{folder} holds no images of {row['key']}: make the table again")
        images = [Image.open(path).convert("RGB") for path in paths]
        if fresh is None:
            scenes = fresh_scenes(trained_concepts(), images[0].width, _FRESH)
            fresh = measures_of([scene.image for scene in scenes])
        energies[row["key"]] = np.array([high_frequency_energy(image) for image in images])
        ratios = np.log(energies[row["key"]] / next(iter(energies.values())))
        found: Row = {"label": row["label"], "high_frequency": float(np.exp(ratios.mean()))}
        if len(ours := measures_of(images)) >= 3:
            found["position"], found["size"] = position_distance(ours, fresh)
        pairs = [(i, asked[single["prompt"]]) for i, single in enumerate(own) if single["prompt"] in asked]
        right = [reader.read(images[i], read_scene(images[i]))[1] == triple.style for i, triple in pairs]
        rows.append(found | ({"right_style": sum(right) / len(right)} if right else {}))
    return rows


def high_frequency_energy(image: Image.Image) -> float:
    """Return the power in the highest octave, in squared levels of 0..255, a mean over the pixels.

    The luminance is seen through a Hann window, so that the image's edges don't count; its highest octave are
    the frequencies of more than a quarter of a cycle a pixel along either axis.
    """
    luma = np.asarray(image.convert("RGB"), dtype=np.float64) @ _LUMA
    rows, columns = (np.hanning(size + 2)[1:-1] for size in luma.shape)
    window = rows[:, None] * columns
    power = np.abs(np.fft.fft2((luma - luma.mean()) * window)) ** 2
    frequencies = [np.abs(np.fft.fftfreq(size)) for size in luma.shape]
    fine = np.maximum(*np.meshgrid(*frequencies, indexing="ij")) > 0.25
    return float(power[fine].sum() / (luma.size * (window**2).sum()))


def measures_of(images: Sequence[Image.Image]) -> np.ndarray:
    """Return the middle (x, y) and the side of each image's sprite, (N, 3); empty images are left out."""
    boxes = [read_scene(image).box for image in images]
    return np.array([_measures(box) for box in boxes if box is not None]).reshape(-1, 3)


def _measures(box: Box) -> tuple[float, float, float]:
    left, top, right, bottom = box
    return (left + right) / 2, (top + bottom) / 2, float(max(right - left, bottom - top))


def position_distance(ours: np.ndarray, fresh: np.ndarray) -> tuple[float, float]:
    """Return how far sprites' positions and sizes are distributed from fresh scenes', in pixels.

    Args:
        ours, fresh: middles and sides, (N, 3) and (M, 3).

    Returns:
        1-Wasserstein distances: of x and y, their mean, and of the side.
    """
    x, y, side = (wasserstein(ours[:, i], fresh[:, i]) for i in range(3))
    return (x + y) / 2, side


def wasserstein(a: np.ndarray, b: np.ndarray) -> float:
    """Return the 1-Wasserstein distance of samples (N,) and (M,): the area between their quantiles."""
    shares = np.unique(np.concatenate([np.arange(1, len(s) + 1) / len(s) for s in (a, b)]))
    widths = np.diff(shares, prepend=0.0)
    values = [np.sort(s)[np.ceil(shares * len(s) - 1e-9).astype(int) - 1] for s in (a, b)]
    return float((widths * np.abs(values[0] - values[1])).sum())
