"""How alike the attention of two queries is, by layer and step: why a few agents can stand for all tokens.

The score is Eq. 6 of "Efficient Diffusion Transformer with Step-wise Dynamic Attention Mediators" (Pu et al.,
ECCV 2024) over `PAIRS` pairs drawn at random in place of all: the mean Jensen-Shannon divergence of two rows
of an attention map, in nats. 0 means that all queries attend alike, ln 2 that no two share a key.
"""

from __future__ import annotations

import io
import math
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from statistics import fmean
from typing import Any

import torch
from matplotlib.figure import Figure
from rich.console import Console
from torch import Tensor
from torch.special import entr

from agentsd.hosts import EVERY_LEVEL, find_attention_layers
from agentsd.progress import progress

from ..environment import describe_environment, describe_run
from ..files import check_writable, write_bytes
from ..images.methods import parse_method
from ..images.models import load_pipeline
from ..images.prompts import ImageSpec, specs_to_show
from ..images.sampling import sample
from ..pages.rows import Column, Row, figure, show, write_rows
from .settings import RedundancySettings

PAIRS = 2000
THIRDS = "first third", "middle third", "last third"


def divergence(query: Tensor, key: Tensor, pairs: Tensor) -> Tensor:
    """The Jensen-Shannon divergence (Eq. 5) of two queries' attention, in nats.

    Args:
        query, key: (M, N, d) of M heads, the scale in the queries.
        pairs: (2, P) numbers of queries.

    Returns:
        (M, P).
    """
    first, second = ((query[:, index] @ key.mT).softmax(-1) for index in pairs)
    return entr((first + second) / 2).sum(-1) - (entr(first) + entr(second)).sum(-1) / 2


def queries_and_keys(attn: Any, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """(M, N, d) each of M heads of tokens (1, N, C), the scale in the queries."""
    query, key = (
        project(tokens)[0].unflatten(1, (attn.heads, -1)).transpose(0, 1).float()
        for project in (attn.to_q, attn.to_k)
    )
    return query * attn.scale, key


class Probe:
    """Hooks that score each self-attention layer of a U-Net, call by call."""

    def __init__(self, seed: int) -> None:
        self.step = -1
        self.scores: dict[int, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        """By the tokens of a level, and the step."""
        self._rng = torch.Generator().manual_seed(seed)

    def begin(self, *call: Any) -> None:
        """Before a call of the U-Net."""
        self.step += 1

    def look(self, attn: Any, args: tuple[Tensor, ...]) -> None:
        """Before a layer's call: score it on the conditional pass, the last of the batch."""
        query, key = queries_and_keys(attn, args[0][-1:])
        pairs = torch.randint(query.shape[1], (2, PAIRS), generator=self._rng)
        pairs = pairs[:, pairs[0] != pairs[1]].to(query.device)
        score = float(divergence(query, key, pairs).mean())
        self.scores[query.shape[1]][self.step].append(score)


def measure(pipe: Any, specs: Sequence[ImageSpec], settings: RedundancySettings, report: Any) -> list[Row]:
    """Return a row for each level, the finest first: its tokens and its mean score in each step."""
    probe, baseline = Probe(settings.seed), parse_method("baseline", None, settings)
    with ExitStack() as stack:
        stack.callback(pipe.unet.register_forward_pre_hook(probe.begin).remove)
        for layer in find_attention_layers(pipe.unet, EVERY_LEVEL, at_most=True):
            stack.callback(layer.attn.register_forward_pre_hook(probe.look).remove)
        for spec in specs:
            probe.step = -1
            sample(pipe, baseline, [spec], settings)
            report()
    rows = []
    for tokens, by_step in sorted(probe.scores.items(), reverse=True):
        scores = [fmean(found) for _, found in sorted(by_step.items())]
        thirds = {
            name: fmean(scores[i * len(scores) // 3 : (i + 1) * len(scores) // 3])
            for i, name in enumerate(THIRDS)
        }
        rows.append({"tokens": tokens, **thirds, "images": len(specs), "scores": scores})
    return rows


def draw(rows: Sequence[Row]) -> Figure:
    """Return the score of each level over the steps."""
    drawing = Figure(figsize=(6, 3.4), dpi=150, layout="constrained")
    axes = drawing.subplots()
    for row in rows:
        axes.plot(row["scores"], marker="o", markersize=3, label=f"{row['tokens']:,} tokens")
    axes.set(xlabel="denoising step (0 is the noisiest)", ylabel="Jensen-Shannon divergence, nats")
    axes.set_ylim(0, math.log(2))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    return drawing


def command(settings: RedundancySettings, console: Console) -> None:
    """Measure during runs of the baseline, print the means, and write them with a drawing."""
    check_writable(settings.out / "redundancy.jsonl")
    pipe, specs = load_pipeline(settings), specs_to_show(settings)
    with progress(console) as bars:
        task = bars.add_task("images", total=len(specs))
        rows = measure(pipe, specs, settings, lambda: bars.advance(task))
    columns = [
        Column("tokens", figure("tokens", ",")),
        *(Column(name, figure(name, ".3f")) for name in THIRDS),
    ]
    tables = {"Mean divergence of two queries' attention, nats (0 to 0.693), by third of the steps": columns}
    write_rows(
        settings.out,
        "redundancy",
        rows,
        tables,
        describe_run(settings, describe_environment(pipe.unet.device)),
    )
    content = io.BytesIO()
    draw(rows).savefig(content, format="png")
    write_bytes(settings.out / "redundancy.png", content.getvalue())
    show(console, rows, tables, "", settings.out)
