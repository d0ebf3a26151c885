"""U-Net calls of unpatched runs, kept and run again: what a recipe loses, and what it costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..hosts import latent_and_timestep
from ..patch import apply_agentsd
from ..recipe import Recipe
from ..steps.run import RunReader
from .cost import Cost, cost_of


class Figures(NamedTuple):
    """What a recipe loses and costs, or what a layer adds to that in a phase.

    Attributes:
        error: mean square of the change of the guided output, over the mean square of that output.
        cost: of a U-Net call, a mean over the run: seconds or multiply-adds.
    """

    error: float
    cost: float


@dataclass(frozen=True)
class Call:
    """A U-Net call of an unpatched run: its arguments, its output, and whether its step is early."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Tensor
    early: bool


def record_calls(
    pipe: Any,
    unet: Any,
    early_frac: float,
    prompts: Sequence[str],
    calls: int,
    seed: int,
    settings: dict[str, Any],
) -> list[Call]:
    """Run the pipeline on each prompt and keep `calls` of its U-Net calls, evenly spread."""
    seen: list[Call] = []
    steps = RunReader(early_frac)

    def keep(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        _, timestep = latent_and_timestep(unet, args, kwargs)
        early = steps.read(timestep, pipe.scheduler).early
        # Copies, as pipelines may change theirs in place.
        seen.append(Call(*deepcopy((args, kwargs, _first(output))), early))

    recorded = []
    hook = unet.register_forward_hook(keep, with_kwargs=True)
    try:
        for i, prompt in enumerate(prompts):
            seen.clear()
            pipe(prompt, generator=torch.Generator().manual_seed(seed + i), output_type="latent", **settings)
            places = {int((j + 0.5) * len(seen) / calls) for j in range(calls)}
            recorded += [seen[place] for place in sorted(places)]
    finally:
        hook.remove()
    return recorded


def _first(output: Any) -> Tensor:
    """A U-Net's output (B, C, H, W), out of what it is wrapped in."""
    return output[0] if isinstance(output, tuple) else output.sample


def is_guided(pipe: Any, guidance_scale: float) -> bool:
    """Whether a batch has two halves, without and with the prompt; known after a run."""
    return getattr(pipe, "do_classifier_free_guidance", guidance_scale > 1)


class Meter:
    """Runs recorded calls under a recipe, and says how far the output went and what it cost."""

    def __init__(self, unet: Any, cost: Cost, calls: list[Call], guidance_scale: float) -> None:
        self.unet = unet
        self.calls = calls
        self.phases = sorted({call.early for call in calls}, reverse=True)
        self._cost = cost
        self._scale = guidance_scale
        self._power = sum(self._mean_square(call.output) for call in calls)

    def whole(self, recipe: Recipe | None) -> Figures:
        """Measure a U-Net call under a recipe, or unpatched."""
        errors, costs = zip(*(self.phase(recipe, early) for early in self.phases), strict=True)
        return Figures(sum(errors), sum(costs))

    def phase(self, recipe: Recipe | None, early: bool, layer: Any | None = None) -> Figures:
        """Measure what the calls of a phase add to the whole; of the cost, what `layer` adds, if given."""
        calls = [call for call in self.calls if call.early == early]
        moved = 0.0
        costs: list[float] = []
        with self._patched(recipe, early):
            for number, call in enumerate(calls):
                measures = self._cost == "time" or number == 0  # multiply-adds are the same in all
                output = self._replay(call, layer, costs if measures else None)
                moved += self._mean_square(output - call.output)
        return Figures(moved / self._power, median(costs) * len(calls) / len(self.calls))

    def _patched(self, recipe: Recipe | None, early: bool) -> AbstractContextManager[object]:
        """A recipe in force in a U-Net whose every call is early, or late."""
        if recipe is None:
            return nullcontext()
        if recipe.timing is not None:
            recipe = recipe.with_settings(early_frac=float(early))
        return apply_agentsd(self.unet, recipe=recipe)

    @torch.no_grad()
    def _replay(self, call: Call, layer: Any | None, costs: list[float] | None) -> Tensor:
        """Run a call again; returns its output, and adds what it cost, or `layer` in it, to `costs`."""

        def metered(forward: Callable[..., Any], costs: list[float]) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                outputs: list[Any] = []
                device = self.unet.device
                costs.append(cost_of(self._cost, device, lambda: outputs.append(forward(*args, **kwargs))))
                return outputs[0]

            return run

        if costs is None:
            return _first(self.unet(*call.args, **call.kwargs))
        if layer is None:
            return _first(metered(self.unet, costs)(*call.args, **call.kwargs))
        before = layer.__dict__.get("forward")
        layer.forward = metered(layer.forward, costs)
        try:
            return _first(self.unet(*call.args, **call.kwargs))
        finally:
            del layer.forward
            if before is not None:
                layer.forward = before

    def _mean_square(self, output: Tensor) -> float:
        """Of what the sampler gets: the two halves of a batch combined, where there is guidance."""
        output = output.float()
        if self._scale > 1 and output.shape[0] % 2 == 0:
            without, with_prompt = output.chunk(2)
            output = without + self._scale * (with_prompt - without)
        return float(output.square().mean())
