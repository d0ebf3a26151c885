"""The redundancy map: the Jensen-Shannon score of each self-attention layer and step (Pu et al. 2024)."""

import io
import math
import re
import statistics
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import Module

from agentsd.hosts import (
    EVERY_LEVEL,
    AttentionLayer,
    find_attention_layers,
    find_model,
    latent_and_timestep,
    named_arguments,
)

from ..environment import describe_run
from ..errors import EvalError
from ..files import check_writable, write_bytes
from ..images.methods import parse_method
from ..images.models import load_pipeline
from ..images.prompts import ImageSpec, note_unknown_words, specs_to_show
from ..images.sampling import sample
from ..pages.rows import Column, Row, figure, progress, to_markdown, to_terminal, write_rows
from .divergence import MAX_SCORE, attention_map, js_score, js_score_sampled
from .settings import RedundancySettings

_ALL = "all layers"
_THIRDS = ("first third", "middle third", "last third")


@dataclass(frozen=True)
class Score:
    """Pu et al.'s Eq. 6 for one layer in one call of the model, nats; `error` is 0 where all pairs count."""

    site: AttentionLayer
    step: int
    timestep: float
    tokens: int
    nats: float
    error: float
    exact: bool


class _Probe:
    """Forward pre-hooks that score the attention of a model's layers in some of its steps.

    A step is a run of calls with one timestep; the first call counts (PLMS and Heun have two).
    """

    def __init__(
        self,
        steps: Collection[int],
        settings: RedundancySettings,
        generator: torch.Generator,
        report: Callable[[], None],
    ) -> None:
        self.scores: list[Score] = []
        self._steps = steps
        self._settings = settings
        self._generator = generator
        self._report = report
        self._step = -1
        self._timestep = math.nan
        self._measuring = False

    def begin(self, model: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before the model's call: count the step."""
        timestep = float(
            torch.as_tensor(latent_and_timestep(model, named_arguments(model, args, kwargs))[1]).max()
        )
        opens = timestep != self._timestep
        self._step += opens
        self._timestep = timestep
        self._measuring = opens and self._step in self._steps

    def see(self, site: AttentionLayer, attn: Any, args: tuple[Tensor, ...]) -> None:
        """Before a layer's call: score it."""
        if not self._measuring:
            return
        query, key = _queries_and_keys(attn, args[0][-1:])
        tokens = query.shape[1]
        if tokens < 2:
            raise EvalError(f"{site.name} has {tokens} token, no pair; choose a larger --height and --width")
        if exact := tokens <= self._settings.exact_tokens:
            heads = [js_score(attention_map(q, k)) for q, k in zip(query.split(1), key.split(1), strict=True)]
            nats, error = statistics.fmean(heads), 0.0
        else:
            nats, error = js_score_sampled(query, key, self._settings.pairs, self._generator)
        self.scores.append(Score(site, self._step, self._timestep, tokens, nats, error, exact))
        self._report()


def _queries_and_keys(attn: Any, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The layer's own projections and norms, (1, N, C) -> twice (M, N, d), the scale in the queries."""
    query, key = (
        projection(tokens)[0].unflatten(1, (attn.heads, -1)).transpose(0, 1)
        for projection in (attn.to_q, attn.to_k)
    )
    if attn.norm_q is not None:
        query = attn.norm_q(query)
    if attn.norm_k is not None:
        key = attn.norm_k(key)
    return query.float() * attn.scale, key.float()


@contextmanager
def scored(
    model: Module,
    steps: Collection[int],
    settings: RedundancySettings,
    generator: torch.Generator,
    report: Callable[[], None] = lambda: None,
) -> Iterator[list[Score]]:
    """Score a U-Net's or DiT's self-attention layers in the calls inside a `with` block, one run of steps.

    Yields the list that fills up, in the order of the calls; `steps` (from 0) are those that count. The last
    row of each batch is taken: of one guided image, the conditional half. The hooks change no output, and
    are gone on leaving. `report` is called after each score.
    """
    probe = _Probe(steps, settings, generator, report)
    with ExitStack() as stack:
        stack.callback(model.register_forward_pre_hook(probe.begin, with_kwargs=True).remove)
        for site in _sites(model):
            stack.callback(site.attn.register_forward_pre_hook(partial(probe.see, site)).remove)
        yield probe.scores


def _sites(model: Module) -> list[AttentionLayer]:
    try:
        return find_attention_layers(model, EVERY_LEVEL, at_most=True)
    except ValueError:
        raise EvalError(
            f"{type(model).__name__} has no spatial self-attention to measure; use SD 1.x, 2.x or SDXL"
        ) from None


def steps_of(settings: RedundancySettings) -> list[int]:
    """Return the steps to measure, from 0, spread evenly from the first to the last."""
    count = min(settings.measured_steps, settings.steps)
    return [i * (settings.steps - 1) // max(1, count - 1) for i in range(count)]


def command(settings: RedundancySettings, console: Console) -> None:
    """Measure, write the figures and the map, print the means."""
    check_writable(settings.out / "redundancy.jsonl")
    pipe = load_pipeline(settings)
    specs = specs_to_show(settings)
    note_unknown_words(pipe, specs, settings, console)
    with progress(console) as bars:
        task = bars.add_task("layers", total=score_count(pipe, specs, settings))
        rows = measure(pipe, specs, settings, lambda: bars.advance(task))
    run = describe_run(settings, pipe.unet.device)
    write_rows(settings.out, "redundancy", rows, [], run, markdown(rows, settings))
    write_bytes(settings.out / "redundancy.png", draw(rows, settings))
    console.print(summary(rows, settings))
    console.print(note(rows, settings))
    console.print(f"map and figures: {settings.out}", soft_wrap=True)


def score_count(pipe: Any, specs: Sequence[ImageSpec], settings: RedundancySettings) -> int:
    """Return how often `measure` will call its `report`."""
    return len(specs) * len(steps_of(settings)) * len(_sites(find_model(pipe)))


def measure(
    pipe: Any, specs: Sequence[ImageSpec], settings: RedundancySettings, report: Callable[[], None]
) -> list[Row]:
    """Make the images one by one with full attention; return a row for each layer and measured step.

    A row's `score` is the mean over heads and images, its `standard_error` what sampling pairs adds to it
    (0 if all are taken), and `image_deviation` the standard deviation between images. Rows stand in
    the order in which the layers ran. Raises EvalError where there is nothing to measure.
    """
    model, steps = find_model(pipe), steps_of(settings)
    baseline = parse_method("baseline", None, settings)
    generator = torch.Generator().manual_seed(settings.seed)
    groups: dict[tuple[str, int], list[Score]] = {}
    for spec in specs:
        with scored(model, steps, settings, generator, report) as scores:
            sample(pipe, baseline, [spec], settings)
        for score in scores:
            groups.setdefault((score.site.name, score.step), []).append(score)
    spans = sorted({group[0].site.downsampling_factor for group in groups.values()})
    return [_row(group, spans) for group in groups.values()]


def _row(group: list[Score], spans: list[int]) -> Row:
    """Return the row of one layer and step from the scores of its images."""
    one, scores = group[0], [score.nats for score in group]
    return {
        "layer": one.site.name,
        "level": 1 + spans.index(one.site.downsampling_factor),
        "span": one.site.downsampling_factor,
        "tokens": one.tokens,
        "heads": one.site.attn.heads,
        "step": one.step,
        "timestep": one.timestep,
        "score": statistics.fmean(scores),
        "standard_error": math.hypot(*(score.error for score in group)) / len(group),
        "pairs": "exact" if one.exact else "sampled",
        "image_deviation": statistics.stdev(scores) if len(scores) > 1 else None,
        "images": len(group),
    }


def by_level(rows: Sequence[Row], steps: int) -> list[Row]:
    """Return the mean score of each level, and of all layers, in each third of the `steps` of a run."""
    return [_thirds(name, group, steps) for name, group in _groups(rows).items()]


def _groups(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return the rows of each level, finest first, and all of them."""
    groups: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: row["level"]):
        groups.setdefault(f"level {row['level']} ({row['tokens']:,} tokens)", []).append(row)
    return {**groups, _ALL: list(rows)}


def _thirds(name: str, rows: Sequence[Row], steps: int) -> Row:
    means = {}
    for number, third in enumerate(_THIRDS):
        scores = [row["score"] for row in rows if row["step"] * 3 // steps == number]
        means[third] = statistics.fmean(scores) if scores else None
    return {"level": name, "layers": len({row["layer"] for row in rows}), **means}


def _columns() -> list[Column]:
    level = Column("mean score by third of the steps", figure("level", ""))
    thirds = [Column(third, figure(third, ".3f")) for third in _THIRDS]
    return [level, Column("layers", figure("layers", "d")), *thirds]


def summary(rows: Sequence[Row], settings: RedundancySettings) -> Table:
    """Return the means by level and third of the steps as a terminal table."""
    return to_terminal(_title(rows, settings), by_level(rows, settings.steps), _columns())


def note(rows: Sequence[Row], settings: RedundancySettings) -> str:
    """Return what the scores are and how sure."""
    text = (
        "Mean Jensen-Shannon divergence of the attention of two queries, nats: 0 (all alike) to ln 2 = "
        f"{MAX_SCORE:.3f}; a low score is high redundancy. Full attention, of the guided batch the "
        "conditional half."
    )
    if sampled := [row for row in rows if row["pairs"] == "sampled"]:
        error = max(row["standard_error"] for row in sampled)
        text += (
            f" Layers above {settings.exact_tokens:,} tokens: {settings.pairs:,} pairs for each step and "
            f"image, standard error {error:.1g} at most; the others: all pairs."
        )
    return text


def markdown(rows: Sequence[Row], settings: RedundancySettings) -> str:
    """Return the means by level and third of the steps in Markdown, with the note."""
    return f"{to_markdown(by_level(rows, settings.steps), _columns())}\n{note(rows, settings)}"


def _title(rows: Sequence[Row], settings: RedundancySettings) -> str:
    images = rows[0]["images"]
    count = f"{images} image{'s' if images > 1 else ''}"
    return f"{settings.model}, {settings.steps} steps ({settings.scheduler}), {count}"


def draw(rows: Sequence[Row], settings: RedundancySettings) -> bytes:
    """Return a PNG: above, the mean score by step and level; below, the score of each layer and step."""
    layers = list(dict.fromkeys(row["layer"] for row in rows))
    steps = sorted({row["step"] for row in rows})
    score = {(row["layer"], row["step"]): row["score"] for row in rows}
    tokens = {row["layer"]: row["tokens"] for row in rows}
    height = 3.2 + max(1.6, 0.26 * len(layers))
    plot = Figure(figsize=(8, height), dpi=150, layout="constrained")
    ratios = [2.2, height - 3.2]
    lines, heat = plot.subplots(2, sharex=True, height_ratios=ratios)
    lines.set_title(f"Redundancy of self-attention: {_title(rows, settings)}", fontsize=10)
    _draw_lines(lines, rows, steps)

    values = [[score[layer, step] for step in steps] for layer in layers]
    mesh = heat.pcolormesh(_edges(steps), range(len(layers) + 1), values, vmin=0, vmax=MAX_SCORE)
    heat.invert_yaxis()
    names = [f"{short_name(layer)} · {tokens[layer]:,}" for layer in layers]
    heat.set_yticks([i + 0.5 for i in range(len(layers))], names, fontsize=8)
    heat.set_ylabel("layer, in running order · tokens")
    heat.set_xlabel(f"denoising step (of {settings.steps}; 0 is the noisiest)")
    heat.xaxis.get_major_locator().set_params(integer=True)
    bar = plot.colorbar(mesh, ax=[lines, heat], fraction=0.04)
    bar.set_label("score, nats (0: all queries alike; ln 2: nothing shared)")
    content = io.BytesIO()
    plot.savefig(content, format="png")
    return content.getvalue()


def _draw_lines(axes: Any, rows: Sequence[Row], steps: Sequence[int]) -> None:
    """Draw the mean over the layers of each level and of all, against the step."""
    for name, group in _groups(rows).items():
        means = [statistics.fmean(r["score"] for r in group if r["step"] == step) for step in steps]
        style = {"color": "black", "linewidth": 2} if name == _ALL else {}
        axes.plot(steps, means, marker="o", markersize=3, label=name, **style)
    axes.set_ylim(0, MAX_SCORE)
    axes.set_ylabel("mean score, nats")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="best")


def _edges(steps: Sequence[int]) -> list[float]:
    """Return the borders of the map's columns: halfway between measured steps."""
    middles = [(a + b) / 2 for a, b in pairwise(steps)]
    first, last = (middles[0], middles[-1]) if middles else (steps[0] + 0.5, steps[0] - 0.5)
    return [2 * steps[0] - first, *middles, 2 * steps[-1] - last]


def short_name(layer: str) -> str:
    """Return "up 1.0.0" for "up_blocks.1.attentions.0.transformer_blocks.0.attn1"."""
    return f"{layer.split('_')[0]} {'.'.join(re.findall(r'[0-9]+', layer.removesuffix('attn1')))}"
