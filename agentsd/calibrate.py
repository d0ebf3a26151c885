"""Find, on a user's own model and prompts, what each self-attention layer should run in each phase."""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any, Literal, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from .config import AgentConfig
from .cost import multiply_adds
from .hosts import EVERY_LEVEL, Site, find_model, find_sites, latent_and_timestep
from .layers import LayerConfigs
from .patch import apply_agentsd
from .schedule import StepReader

Cost = Literal["time", "multiply_adds"]
RATIOS = (0.25, 0.5)
"""What token merging and agent attention are tried with; agent attention also without merging."""


@dataclass(frozen=True)
class Call:
    """A U-Net call of an unpatched run: its arguments, the guided output, and whether its step is early."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Tensor
    early: bool


class Choice(NamedTuple):
    """What a layer runs in a phase: "none", "tome" or "agent", with a ratio."""

    does: str
    ratio: float


@dataclass(frozen=True)
class Option:
    """What one layer may run in one phase, and what it loses and costs there.

    Attributes:
        choice: what it runs.
        error: mean squared change of the guided output, over its mean square; mean of the phase's calls.
        cost: of the layer, a mean over the phase's calls: seconds or multiply-adds.
    """

    choice: Choice
    error: float
    cost: float


def calibrate(
    pipe: Any,
    prompts: Sequence[str],
    *,
    speedup: float | None = None,
    max_error: float | None = None,
    cost: Cost = "time",
    base: AgentConfig | None = None,
    num_inference_steps: int = 50,
    guidance_scale: float = 7.5,
    calls: int = 6,
    seed: int = 0,
    on_step: Callable[[int, int], None] | None = None,
    **call_kwargs: Any,
) -> LayerConfigs:
    """Choose stock attention, token merging or agent attention for each layer and phase of a U-Net.

    Each choice is tried in each layer alone, on recorded calls of unpatched runs. From stock attention on,
    the change that saves most for the error it adds is made, one after another; of these whole settings the
    one that meets the goal with the least error (or the most saved), measured as a whole, is returned.

    Args:
        pipe: a diffusers pipeline with a `unet`; it is left as it was.
        prompts: what to record; a handful that is like the prompts to come.
        speedup: the goal: a U-Net call's cost, a mean over a run's steps, over what it is to be; above 1.
        max_error: or the goal: the largest error, as of `Option`.
        cost: what counts as cost: "time" (CPU seconds, on a GPU seconds) or "multiply_adds" (exact).
        base: the settings that are not searched (k, scale, early_frac, strides ...); exact mode.
        num_inference_steps, guidance_scale, call_kwargs: of the pipeline's call.
        calls: how many U-Net calls of each prompt's run are recorded, evenly spread.
        seed: the first prompt's; the i-th has seed + i.
        on_step: told how many of how many trials are done.

    Returns:
        Settings by layer, for `apply_agentsd(pipe, config=...)`; `measured` says what was measured.

    Raises:
        ValueError: not exactly one goal, or one that no choice meets; the message says what can be had.
    """
    _check_goal(prompts, speedup, max_error)
    base = base or AgentConfig()
    unet = find_model(pipe)
    if hasattr(unet, "_agentsd"):
        raise ValueError("the pipeline is patched: call remove_agentsd(pipe) first")
    settings = {"num_inference_steps": num_inference_steps, "guidance_scale": guidance_scale, **call_kwargs}
    recorded = _record(pipe, unet, prompts, calls, base.early_frac, seed, settings)
    meter = _Meter(unet, cost, guidance_scale)
    table = _try_each(meter, recorded, base, on_step)
    share = sum(call.early for call in recorded) / len(recorded)
    whole = [_layers(base, picked) for picked in _frontier(table, {True: share, False: 1 - share})]
    stock = meter.call_cost(recorded)

    @cache
    def measured(place: int) -> tuple[float, float]:
        error, spent = meter.whole(whole[place], recorded)
        return error, stock / spent

    places = range(len(whole))
    if speedup is not None:
        place = bisect_left(places, speedup, key=lambda i: measured(i)[1])
    else:
        place = bisect_right(places, max_error or 0.0, key=lambda i: measured(i)[0]) - 1
    if place not in places:
        goal = f"speedup={speedup}" if speedup is not None else f"max_error={max_error}"
        had = "no choice saves anything"
        if whole:
            had = f"the least error is {measured(0)[0]:.2g}, the greatest speedup {measured(-1)[1]:.3f}"
        raise ValueError(f"{goal} cannot be met on this model at this size: {had}")
    error, gained = measured(place)
    counts = {"prompts": len(prompts), "calls": len(recorded)}
    return LayerConfigs(whole[place], {"error": error, "speedup": gained, "cost": cost, **counts})


def _check_goal(prompts: Sequence[str], speedup: float | None, max_error: float | None) -> None:
    if (speedup is None) == (max_error is None):
        raise ValueError(f"speedup={speedup}, max_error={max_error}: give one goal, the one or the other")
    if speedup is not None and speedup <= 1:
        raise ValueError(f"speedup={speedup}: pass more than 1, for instance 1.15")
    if max_error is not None and max_error <= 0:
        raise ValueError(f"max_error={max_error}: pass more than 0, for instance 0.001")
    if not prompts or isinstance(prompts, str):
        raise ValueError(f"prompts={prompts!r}: pass a list of a few that are like the ones to come")


def _try_each(
    meter: _Meter, recorded: list[Call], base: AgentConfig, on_step: Callable[[int, int], None] | None
) -> dict[tuple[str, bool], list[Option]]:
    """The options of each layer and phase (True: early), the first of them stock attention."""
    sites = find_sites(meter.unet, EVERY_LEVEL, at_most=True)
    by_phase = {early: [call for call in recorded if call.early == early] for early in (True, False)}
    places = [(site, early) for early, calls in by_phase.items() if calls for site in sites]
    choices = _choices(base)
    table: dict[tuple[str, bool], list[Option]] = {}
    for done, (site, early) in enumerate(places):
        options = []
        for i, choice in enumerate(choices):
            figures = meter.layer(site, _for_phase(base, choice, early), by_phase[early])
            options.append(Option(choice, *figures))
            if on_step is not None:
                on_step(done * len(choices) + i + 1, len(places) * len(choices))
        table[site.name, early] = options
    return table


def _choices(base: AgentConfig) -> list[Choice]:
    """What is tried in a layer and phase; the first is stock attention."""
    merging = [Choice(does, ratio) for does in ("tome", "agent") for ratio in RATIOS]
    return [Choice("none", base.ratio), *merging, Choice("agent", 0.0)]


def _for_phase(base: AgentConfig, choice: Choice, early: bool) -> AgentConfig:
    """Settings that follow the choice in one phase and leave the other untouched."""
    if early:
        return replace(base, early=choice.does, ratio=choice.ratio, late="none", late_ratio=None)
    return replace(base, early="none", late=choice.does, late_ratio=choice.ratio)


def _layers(base: AgentConfig, picked: dict[tuple[str, bool], Option]) -> dict[str, AgentConfig]:
    """The settings of each layer that is not stock in both phases."""
    layers = {}
    for name in dict.fromkeys(name for name, _ in picked):
        early, late = (
            picked[name, phase].choice if (name, phase) in picked else Choice("none", base.ratio)
            for phase in (True, False)
        )
        if {early.does, late.does} != {"none"}:
            both = {"early": early.does, "ratio": early.ratio, "late": late.does, "late_ratio": late.ratio}
            layers[name] = AgentConfig(**{**asdict(base), **both, "levels": None})
    return layers


def _frontier(
    table: dict[tuple[str, bool], list[Option]], weights: dict[bool, float]
) -> Iterator[dict[tuple[str, bool], Option]]:
    """Whole choices from stock on, each step the one that saves most for the error it adds."""
    picked = {key: options[0] for key, options in table.items()}
    while True:
        steps = []
        for key, options in table.items():
            now, weight = picked[key], weights[key[1]]
            for option in options:
                saved, added = weight * (now.cost - option.cost), weight * (option.error - now.error)
                if saved > 0:
                    steps.append((added / saved, -saved, key, option))
        if not steps:
            return
        _, _, key, option = min(steps, key=lambda step: step[:2])
        picked[key] = option
        yield dict(picked)


def _record(
    pipe: Any,
    unet: Any,
    prompts: Sequence[str],
    calls: int,
    early_frac: float,
    seed: int,
    settings: dict[str, Any],
) -> list[Call]:
    """Run the pipeline on each prompt and keep `calls` of its U-Net calls, evenly spread."""
    seen: list[Call] = []
    steps = StepReader(early_frac)  # without a scheduler, as when a bare U-Net is called again

    def keep(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        _, timestep = latent_and_timestep(unet, args, kwargs)
        early = steps.read(timestep, None).early
        first = output[0] if isinstance(output, tuple) else output.sample
        guided = _guided(first.detach(), settings["guidance_scale"])
        seen.append(Call(_copied(args), _copied(kwargs), guided, early))

    recorded = []
    hook = unet.register_forward_hook(keep, with_kwargs=True)
    try:
        for i, prompt in enumerate(prompts):
            seen.clear()
            pipe(prompt, generator=torch.Generator().manual_seed(seed + i), output_type="latent", **settings)
            places = {int((j + 0.5) * len(seen) / calls) for j in range(min(calls, len(seen)))}
            recorded += [seen[place] for place in sorted(places)]
    finally:
        hook.remove()
    return recorded


def _copied(value: Any) -> Any:
    """The value, its tensors copied: pipelines may change theirs in place."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copied(part) for key, part in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(_copied(part) for part in value)
    return value


def _guided(output: Tensor, guidance_scale: float) -> Tensor:
    """What the sampler gets: the two halves combined, where there is guidance."""
    if guidance_scale <= 1 or output.shape[0] % 2:
        return output
    without, with_prompt = output.float().chunk(2)
    return without + guidance_scale * (with_prompt - without)


@dataclass(frozen=True)
class _Meter:
    """Runs recorded calls under settings, and says how far the output went and what it cost."""

    unet: Any
    cost: Cost
    guidance_scale: float

    def layer(self, site: Site, config: AgentConfig, calls: list[Call]) -> tuple[float, float]:
        """Mean error, and cost of the layer alone, with only that layer patched."""
        return self._measure({site.name: config}, calls, site.attn)

    def whole(self, layers: dict[str, AgentConfig], calls: list[Call]) -> tuple[float, float]:
        """Mean error, and cost of a U-Net call, with all layers patched."""
        return self._measure(layers, calls, self.unet)

    def call_cost(self, calls: list[Call]) -> float:
        """Mean cost of an unpatched U-Net call."""
        return sum(self._one(call, self.unet)[1] for call in calls) / len(calls)

    def _measure(self, layers: dict[str, AgentConfig], calls: list[Call], module: Any) -> tuple[float, float]:
        with apply_agentsd(self.unet, config=LayerConfigs(layers)):
            figures = [self._one(call, module) for call in calls]
        errors, costs = zip(*figures, strict=True)
        return sum(errors) / len(calls), sum(costs) / len(calls)

    @torch.no_grad()
    def _one(self, call: Call, module: Any) -> tuple[float, float]:
        """A call's error, and what `module` cost in it."""
        costs: list[float] = []
        forward = module.forward

        def measured(*args: Any, **kwargs: Any) -> Any:
            outputs: list[Any] = []

            def run() -> None:
                outputs.append(forward(*args, **kwargs))

            costs.append(
                multiply_adds(run) if self.cost == "multiply_adds" else _seconds(run, self.unet.device)
            )
            return outputs[0]

        with patch.object(module, "forward", measured):
            output = self.unet(*call.args, **call.kwargs)
        first = output[0] if isinstance(output, tuple) else output.sample
        moved = _guided(first, self.guidance_scale) - call.output
        return float(moved.square().mean() / call.output.square().mean()), sum(costs)


def _seconds(run: Callable[[], None], device: torch.device) -> float:
    with _clock(device) as spent:
        run()
    return spent[0]


@contextmanager
def _clock(device: torch.device) -> Iterator[list[float]]:
    """CPU seconds of a block; on a GPU seconds, after it has finished what came before and inside."""
    cuda = device.type == "cuda"
    now = time.perf_counter if cuda else time.process_time
    spent: list[float] = []
    if cuda:
        torch.cuda.synchronize(device)
    start = now()
    yield spent
    if cuda:
        torch.cuda.synchronize(device)
    spent.append(now() - start)
