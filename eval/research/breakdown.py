"""Where the time of a U-Net call goes, part by part, under each method."""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from diffusers.models.resnet import ResnetBlock2D
from rich.console import Console
from rich.table import Table

from agentsd.attention import agents, merge, pooled, ranking
from agentsd.hosts import EVERY_LEVEL, find_attention_layers

from ..cost.latency import Case, forward_call, load
from ..environment import describe_run
from ..errors import EvalError
from ..files import check_writable
from ..images.methods import Method, expand
from ..pages.rows import Column, Row, figure, progress, to_terminal, write_rows
from .settings import ProfileSettings

TOTAL = "whole call"
REST = "everything else"
# Functions of the core that have a part of their own, and the modules that call them by that name.
_FUNCTIONS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "rank_tokens": ("matching: rank", (ranking,)),
    "make_merge_map": ("matching: cut", (ranking, agents)),
    "merge": ("merge", (agents, merge, pooled)),
    "merge_rows": ("merge", (agents,)),
    "unmerge": ("unmerge", (agents, merge, pooled)),
}


class Clock:
    """Charges each moment to the part entered last (exclusive time): CPU seconds, on a GPU wall seconds.

    On a GPU each entry and exit waits for the device, which slows the whole down.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._parts = [REST]
        self._since = 0.0
        self.seconds: dict[str, float] = defaultdict(float)

    def _now(self) -> float:
        if self._device.type != "cuda":
            return time.process_time()
        torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def _charge(self) -> None:
        now = self._now()
        self.seconds[self._parts[-1]] += now - self._since
        self._since = now

    @contextmanager
    def running(self) -> Iterator[None]:
        """Measure from here to the end of the block."""
        self._since = self._now()
        yield
        self._charge()

    def enter(self, part: str) -> None:
        """From now on time is this part's."""
        self._charge()
        self._parts.append(part)

    def leave(self) -> None:
        """From now on time is the part's that was entered before."""
        self._charge()
        self._parts.pop()


def parts_of(unet: Any, latent_pixels: int) -> dict[torch.nn.Module, str]:
    """Return the modules that have a part of their own, for a square latent."""
    parts: dict[torch.nn.Module, str] = {
        module: "residual blocks" for module in unet.modules() if isinstance(module, ResnetBlock2D)
    }
    latent = torch.empty(1, 1, latent_pixels, latent_pixels, device="meta")
    for site in find_attention_layers(unet, EVERY_LEVEL, at_most=True):
        height, width = site.grid(latent)
        where = f"{height * width:,} tokens"
        parts[site.attn] = f"self-attention core, {where}"
        for projection in (site.attn.to_q, site.attn.to_k, site.attn.to_v, site.attn.to_out[0]):
            parts[projection] = f"self-attention projections, {where}"
        parts[site.block.attn2] = "cross-attention"
        parts[site.block.ff] = f"feed-forward, {where}"
    return parts


@contextmanager
def watched(unet: Any, parts: dict[torch.nn.Module, str], clock: Clock) -> Iterator[None]:
    """Charge the parts' time to the clock within a `with` block, and leave no trace after it."""
    with ExitStack() as stack:
        for module, part in parts.items():
            # A wrapper, not hooks: those of the method under test belong to the part as well.
            stack.enter_context(patch.object(module, "forward", _timed(module.forward, part, clock)))
        for name, (part, places) in _FUNCTIONS.items():
            for place in places:
                stack.enter_context(patch.object(place, name, _timed(getattr(place, name), part, clock)))
        yield


def _timed(function: Callable[..., Any], part: str, clock: Clock) -> Callable[..., Any]:
    def timed(*args: Any, **kwargs: Any) -> Any:
        clock.enter(part)
        try:
            return function(*args, **kwargs)
        finally:
            clock.leave()

    return timed


def command(settings: ProfileSettings, console: Console) -> None:
    """Measure, and after each case write what is known; print the tables at the end."""
    methods = methods_of(settings)
    check_writable(settings.out / "profile.jsonl")
    pipe = load(settings)
    cases = cases_of(settings, pipe)
    run = describe_run(settings, pipe.unet.device)
    every: list[Row] = []
    tables = []
    with progress(console) as bars:
        task = bars.add_task("rounds", total=len(cases) * len(methods) * (settings.repeats + 1))
        for rows in measure(pipe, cases, methods, settings, lambda: bars.advance(task)):
            tables.append(summary(rows, methods, settings))
            every += rows
            write_rows(settings.out, "profile", every, [columns_of(methods)], run)
    for table in tables:
        console.print(table)
    console.print(f"figures: {settings.out}", soft_wrap=True)


def methods_of(settings: ProfileSettings) -> list[Method]:
    """Return the methods, baseline first if it is measured.

    Raises:
        EvalError: one has no cost within a U-Net call, or none is left.
    """
    methods = expand(settings.methods, [settings.ratio], settings)[0 if settings.baseline else 1 :]
    if not methods:
        raise EvalError("--no-baseline leaves no method to measure: name one with --method, or leave it out")
    if wrong := [method.name for method in methods if not method.within_a_call]:
        raise EvalError(f"{wrong[0]} saves whole U-Net calls, not parts of one; see `agentsd-eval latency`")
    return methods


def cases_of(settings: ProfileSettings, pipe: Any) -> list[Case]:
    """Return each phase at each size."""
    sizes = settings.sizes or (pipe.unet.config.sample_size * pipe.vae_scale_factor,)
    return [Case(f"forward {phase}", size, 1) for size in sizes for phase in settings.phases]


@torch.no_grad()
def measure(
    pipe: Any, cases: list[Case], methods: list[Method], settings: ProfileSettings, report: Callable[[], None]
) -> Iterator[list[Row]]:
    """Yield each case's rows, one for each part, with its median seconds under each method.

    The methods take turns after a warm-up round; `report` is called after each method's turn.
    """
    unet = pipe.unet
    for case in cases:
        run = forward_call(pipe, case, settings.guidance_scale)
        parts = parts_of(unet, case.size // pipe.vae_scale_factor)
        rounds: dict[Method, list[dict[str, float]]] = {method: [] for method in methods}
        for number in range(settings.repeats + 1):
            for method in methods:
                clock = Clock(unet.device)
                with method.applied(unet) as applied, watched(unet, parts, clock):
                    applied.reseed(0)
                    with clock.running():
                        run()
                if number:
                    rounds[method].append({**clock.seconds, TOTAL: sum(clock.seconds.values())})
                report()
        names = {part for turns in rounds.values() for seconds in turns for part in seconds}
        rows = [_row(case, name, rounds) for name in names]
        first = methods[0].label
        yield sorted(rows, key=lambda row: (row["part"] in (REST, TOTAL), row["part"] == TOTAL, -row[first]))


def _row(case: Case, part: str, rounds: dict[Method, list[dict[str, float]]]) -> Row:
    row: Row = {"phase": case.scope.removeprefix("forward "), "size": case.size, "part": part}
    for method, turns in rounds.items():
        row[method.label] = statistics.median(turn.get(part, 0.0) for turn in turns)
        row[f"{method.label} share"] = statistics.median(turn.get(part, 0.0) / turn[TOTAL] for turn in turns)
    return row


def columns_of(methods: list[Method], with_case: bool = True) -> list[Column]:
    """Return the part and, for each method, its seconds and share of the whole call."""
    case = [Column("step", figure("phase", "")), Column("px", figure("size", "d"))] if with_case else []
    columns = [Column(method.label, _seconds_and_share(method.label)) for method in methods]
    return [Column("part", figure("part", "")), *case, *columns]


def _seconds_and_share(key: str) -> Callable[[Row], str]:
    return lambda row: f"{row[key]:.3f} s ({row[f'{key} share']:.1%})" if row[key] else "-"


def title_of(row: Row, settings: ProfileSettings) -> str:
    """Return what a case's table is of."""
    phase = "an early step" if row["phase"] == "early" else "a later step"
    call = "guided U-Net call" if settings.guidance_scale > 1 else "U-Net call"
    return f"{settings.arch or settings.model}, one {call} in {phase}, {row['size']} px"


def summary(rows: list[Row], methods: list[Method], settings: ProfileSettings) -> Table:
    """Return a case's terminal table."""
    return to_terminal(title_of(rows[0], settings), rows, columns_of(methods, with_case=False))
