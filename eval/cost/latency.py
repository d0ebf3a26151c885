"""Cost alone: of one U-Net call by phase, or of a whole pipeline call."""

import copy
import itertools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..images.methods import Method, expand
from ..images.models import find_device, load_pipeline, scheduler_like
from ..images.sampling import Seconds, Stopwatch
from ..settings import CostSettings, LatencySettings
from .architectures import build, normal, random_embeds
from .macs import macs
from .memory import memory_per_image

PHASES = {"forward early": 999, "forward late": 1}
"""The timestep at which a call of each phase is made."""
Run = Callable[..., Any]


@dataclass(frozen=True)
class Case:
    """What is measured ("pipeline", "forward early", "forward late"), at what size and batch."""

    scope: str
    size: int
    batch: int


def cases_of(settings: LatencySettings, pipe: Any) -> list[Case]:
    """Return every scope at every size and batch."""
    sizes = settings.sizes or (pipe.unet.config.sample_size * pipe.vae_scale_factor,)
    scopes = [s for scope in settings.scopes for s in (PHASES if scope == "forward" else (scope,))]
    return [Case(scope, size, batch) for size in sizes for batch in settings.batches for scope in scopes]


def methods_of(settings: LatencySettings) -> list[Method]:
    """Return every method, baseline first. Raises EvalError on an unknown one."""
    return expand(settings.methods, [settings.ratio], settings, settings.fewer_steps)


@torch.no_grad()
def measure(
    pipe: Any, cases: list[Case], methods: list[Method], settings: LatencySettings, report: Callable[[], None]
) -> Iterator[dict[str, Any]]:
    """Yield a row of figures for each case and method.

    A speed-up is the median over the rounds of the baseline's time over the method's. What saves whole calls
    has no cost within one. A method that needs more memory than the GPU has gets a row without figures.
    `report` is called after each round, the warm-up too.
    """
    for case in cases:
        asked = [method for method in methods if case.scope == "pipeline" or method.within_a_call]
        costs, seconds = _timed(pipe, case, asked, settings, report)
        for method in asked:
            row = row_of(method, case, settings.repeats, seconds.get(method, [])) | costs.get(method, {})
            yield row | speedup_of(seconds, method, pipe.unet.device)


def _timed(
    pipe: Any, case: Case, methods: list[Method], settings: LatencySettings, report: Callable[[], None]
) -> tuple[dict[Method, dict[str, Any]], dict[Method, list[Seconds]]]:
    """Return the MACs and GB, and each round's time, of the methods that memory does for.

    Each has a U-Net of its own, on the same weights. They take turns (A B C A B C), after a warm-up round.
    """
    costs: dict[Method, dict[str, Any]] = {}
    runs: dict[Method, Run] = {}
    pipes: dict[Method, Any] = {}
    seconds: dict[Method, list[Seconds]] = {}
    with ExitStack() as stack:
        if settings.compile:  # all these U-Nets run the same code, and each is a recompilation of it
            stack.enter_context(torch._dynamo.config.patch(recompile_limit=16 * len(methods)))
        for method in methods:
            own = _with_unet_of_its_own(pipe)
            run = stack.enter_context(applied(method, own, case, settings))
            with as_memory_allows():
                count = macs(run) if settings.count else None
                if not settings.count:
                    run()
                if settings.compile:
                    own.unet.compile()
                    run()
                runs[method], seconds[method], pipes[method] = run, [], own
                costs[method] = {"macs": count}
        report()
        for _ in range(settings.repeats):
            for method, run in runs.items():
                with Stopwatch(pipe.unet.device) as watch:
                    run()
                seconds[method].append(watch.seconds)
            report()
        for method, own in pipes.items():
            costs[method]["memory_per_image"] = _memory(own, method, case, settings)
    return costs, seconds


@contextmanager
def as_memory_allows() -> Iterator[None]:
    """End a block where the GPU has too little memory for it."""
    try:
        yield
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()


def row_of(method: Method, case: Case, repeats: int, rounds: Sequence[Seconds]) -> dict[str, Any]:
    """Return what a row is of, and its times."""
    return {
        "scope": case.scope,
        "size": case.size,
        "batch": case.batch,
        "method": method.name,
        "ratio": method.ratio,
        "backend": method.backend,
        "seconds": statistics.median(s.wall for s in rounds) if rounds else None,
        "cpu_seconds": statistics.median(s.cpu for s in rounds) if rounds else None,
        "rounds": repeats,
        "macs": None,
        "memory_per_image": None,
    }


@contextmanager
def applied(method: Method, pipe: Any, case: Case, settings: LatencySettings) -> Iterator[Run]:
    """Apply a method, its random choices fixed, and yield the call to measure."""
    with method.applied(pipe if case.scope == "pipeline" else pipe.unet):
        yield workload(pipe, case, settings, method.steps)


def _with_unet_of_its_own(pipe: Any) -> Any:
    """Return a pipeline with a copy of the U-Net on the same weights."""
    shared = {id(t): t for t in itertools.chain(pipe.unet.parameters(), pipe.unet.buffers())}
    own = copy.copy(pipe)
    own.unet = copy.deepcopy(pipe.unet, shared)
    return own


def _memory(pipe: Any, method: Method, case: Case, settings: LatencySettings) -> float | None:
    """Return the GB of one more image of a method that is applied, if memory does for it."""

    def call(batch: int) -> None:
        workload(pipe, replace(case, batch=batch), settings, method.steps)()

    with as_memory_allows():
        return memory_per_image(call, case.batch, pipe.unet.device, warm=settings.compile)
    return None


def speedup_of(
    seconds: Mapping[Method, Sequence[Seconds]], method: Method, device: torch.device
) -> dict[str, float | None]:
    """Return the median, least and greatest paired ratio of the baseline's time to the method's."""
    names = "speedup", "speedup_low", "speedup_high"
    baseline = next((rounds for other, rounds in seconds.items() if other.is_baseline), None)
    if baseline is None or method not in seconds:
        return dict.fromkeys(names)
    rounds = zip(baseline, seconds[method], strict=True)
    ratios = [theirs.charged(device) / ours.charged(device) for theirs, ours in rounds]
    return dict(zip(names, (statistics.median(ratios), min(ratios), max(ratios)), strict=True))


def workload(pipe: Any, case: Case, settings: LatencySettings, steps: int | None = None) -> Run:
    """Return the call to measure, on random inputs that don't depend on the method.

    `steps` are a whole run's, if not those of the settings.
    """
    if case.scope == "pipeline":
        return _pipeline_call(pipe, case, settings, steps or settings.steps)
    return forward_call(pipe, case, settings.guidance_scale)


def forward_call(pipe: Any, case: Case, guidance_scale: float) -> Run:
    """Return one guided call of the U-Net in the case's phase, or at a timestep, on random inputs."""
    unet = pipe.unet
    guided = 2 if guidance_scale > 1 else 1
    side = case.size // pipe.vae_scale_factor
    rng = torch.Generator("cpu").manual_seed(0)
    rows = guided * case.batch
    latents = normal((rows, unet.config.in_channels, side, side), rng, unet)
    embeds = random_embeds(unet, rows, rng)
    extra: dict[str, Any] = {}
    if "pooled_prompt_embeds" in embeds:
        size = [[case.size, case.size, 0, 0, case.size, case.size]] * rows
        time_ids = torch.tensor(size, device=unet.device, dtype=unet.dtype)
        extra["added_cond_kwargs"] = {"text_embeds": embeds["pooled_prompt_embeds"], "time_ids": time_ids}
    usual = torch.tensor(PHASES.get(case.scope, 999), device=unet.device)
    return lambda timestep=usual: unet(
        latents, timestep, encoder_hidden_states=embeds["prompt_embeds"], **extra
    )


def _pipeline_call(pipe: Any, case: Case, settings: LatencySettings, steps: int) -> Run:
    if getattr(pipe, "tokenizer", None) is not None:
        prompt: dict[str, Any] = {"prompt": ["a photograph"] * case.batch}
    else:
        prompt = random_embeds(pipe.unet, case.batch, torch.Generator("cpu").manual_seed(0))
        prompt |= {f"negative_{name}": torch.zeros_like(embeds) for name, embeds in prompt.items()}

    def run() -> Any:
        return pipe(
            **prompt,
            height=case.size,
            width=case.size,
            num_inference_steps=steps,
            guidance_scale=settings.guidance_scale,
            generator=[torch.Generator("cpu").manual_seed(i) for i in range(case.batch)],
        )

    return run


def load(settings: CostSettings) -> Any:
    """Return the pipeline to measure: the bare architecture with random weights, or the model."""
    if settings.arch is None:
        return load_pipeline(settings)
    pipe = build(settings.arch, find_device(settings.device), getattr(torch, settings.dtype))
    pipe.scheduler = scheduler_like(pipe.scheduler, settings.scheduler)
    pipe.set_progress_bar_config(disable=True)
    return pipe
