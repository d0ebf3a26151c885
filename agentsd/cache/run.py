"""A run whose calls skip layers or the unconditional pass: what each of them computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import Module

from ..attention.processor import LayerState
from ..attention.residual import FULL, KEEP, PLAIN, SHARE, ResidualSharing
from ..hosts.schedulers import Sampler, SigmaStep
from ..steps.run import RunReader, Step
from .conditional import (
    both_passes,
    conditional_arguments,
    difference_of,
    is_guided,
    sample_of,
    unknown_argument,
    with_sample,
)
from .correction import CachedStep, correction
from .guidance import GuidanceCache
from .plan import COMPUTED, Kind, plan_run
from .residuals import Residuals
from .skipped import SkippedLayers
from .states import States
from .steps import StepCache
from .streams import Kept, Stream, identity
from .suited import why_uncached

_JUMPS = (
    "agentsd: the U-Net is called on timesteps that skip some of the scheduler's list; what is left of the "
    "run is planned anew there, and cached steps are not corrected"
)
_OFF_LIST = (
    "agentsd: a timestep is not one of the scheduler's list, so its call is computed in whole; pass elements "
    "of scheduler.timesteps to the U-Net"
)
_UNKNOWN = (
    "agentsd: the timesteps are not those of a scheduler that is known, so cached steps are not corrected; "
    "pass elements of scheduler.timesteps to the U-Net"
)
_UNGUIDED = "agentsd: no guidance of two passes was found in a call, so none was halved"

Again: TypeAlias = Callable[[dict[str, Any], Any], Any]
"""Computes a cached step once more: its arguments, what its attention was planned from -> the output."""


@dataclass
class Call:
    """The call under way.

    Attributes:
        kind: what it computes.
        sigma: its noise level, as states are kept by.
        stream: where its states are kept; None if they are not.
        last: it is in the last step of its run.
        step: what its sampler's step makes of it, where cached steps are corrected.
        given, planned: of a cached step that is to be corrected, as in `CachedStep`.
    """

    kind: Kind
    sigma: float | None = None
    stream: Stream | None = None
    last: bool = False
    step: SigmaStep | None = None
    given: dict[str, Any] | None = None
    planned: Any = None


class Caching:
    """Skips in a U-Net's calls what a recipe says.

    Args:
        unet: the model.
        steps, guidance, residual: the recipe's settings.
        layers: whose residuals are shared.

    Attributes:
        skipped: the layers that its cached steps skip, where it has any.
        words: what the user is to be told, a line each, since this was last emptied.

    Raises:
        ValueError: the model's blocks are not Stable Diffusion's.
    """

    def __init__(
        self,
        unet: Any,
        steps: StepCache | None,
        guidance: GuidanceCache | None,
        residual: ResidualSharing | None = None,
        layers: Sequence[LayerState] = (),
    ) -> None:
        if not hasattr(unet, "up_blocks"):
            raise ValueError(
                f"{type(unet).__name__} is no U-Net, and no layer of it can be skipped: "
                'pass mode="paper", or a recipe without steps, guidance and residual'
            )
        self._steps, self._guidance, self._residual, self._layers = steps, guidance, residual, layers
        self.skipped = None if steps is None else SkippedLayers(unet, steps.layers)
        self.words: list[str] = []
        self._kept = Kept()
        self._call: Call | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_call": None}

    def reset(self, *args: Any, **kwargs: Any) -> None:
        """Let go of all that the thread's run keeps; diffusers calls it when a pipeline is done."""
        self._kept.streams.clear()
        self._kept.open = False
        self._kept.sampler = Sampler(None, ())

    def detach(self) -> None:
        """Leave the model whole, and nothing kept."""
        self._end()
        self.reset()

    @property
    def sharing(self) -> tuple[Residuals | None, float | None]:
        """The residuals of the call under way, and its noise level."""
        call = self._call
        return (None, None) if call is None or call.stream is None else (call.stream.residuals, call.sigma)

    @property
    def corrected(self) -> int:
        """How many cached steps of the thread's run were."""
        return self._kept.corrected

    def begin(
        self,
        unet: Module,
        step: Step,
        reader: RunReader,
        stages: tuple[int, ...],
        given: dict[str, Any],
        pipe: Any,
        scheduler: Any,
    ) -> tuple[Kind, dict[str, Any]]:
        """Decide what a call computes.

        Args:
            unet: the model.
            step: where in its run the call is, as `reader` has just read.
            stages: of its images.
            given: its arguments by name.
            pipe: the pipeline, where it is known.
            scheduler: of the run, where it is known.

        Returns:
            What it computes, and its arguments, halved where it is conditional-only.
        """
        self._end()  # a call that died
        kept = self._kept
        if step.opens or step.jumps or not kept.open:
            self._open(unet, reader, scheduler)
            if step.jumps:
                self.words.append(_JUMPS)
        place = reader.place
        alone = COMPUTED if self._residual is None else replace(COMPUTED, attention=FULL)
        self._call = Call(alone)
        if step.off_list and kept.plan:
            self.words.append(_OFF_LIST)
        if not kept.plan or step.off_list or not self._may_keep():
            return alone, given
        off = self._is_off(pipe, scheduler)
        stream = self._stream(given, place, reader.stride, off)
        if stream is None:
            return alone, given
        kind = self._possible(kept.plan[reader.levels[place]], stream, given, stages)
        stream.place = place
        last = place + reader.stride >= len(reader.levels)
        sampler_step = kept.steps[place] if kept.steps else None
        self._call = Call(kind, kept.sampler.coordinate(place), stream, last, sampler_step)
        if not kind.guided:
            stream.halved = True
            given = conditional_arguments(given)
        return kind, given

    def start(self, given: dict[str, Any], planned: Any) -> dict[str, Any]:
        """Skip the layers of the call that `begin` decided on; returns its arguments.

        Args:
            given: its arguments by name.
            planned: what its attention is planned from; handed back where it is computed once more.
        """
        call = self._call
        if call is None or call.kind.computed or self.skipped is None or call.stream is None:
            return given
        states = call.stream.states if call.kind.guided else call.stream.states[-1:]
        self.skipped.begin(_together([state.at(call.sigma) for state in states]))
        given = self.skipped.without_residuals(given)
        if call.step is not None:
            given["sample"] = given["sample"].clone()  # samplers may write into theirs
            call.given, call.planned = given, planned
        return given

    def end(self, output: Any, again: Again) -> Any:
        """What the caller gets for what the U-Net gave; None if it raised."""
        call, seen = self._end()
        if output is None:
            self.reset()
        if call is None or output is None or call.stream is None:
            return output
        stream, kind = call.stream, call.kind
        if kind.computed and seen is not None:
            states = stream.states if kind.guided else stream.states[-1:]
            for state, part in zip(states, seen.chunk(len(states)), strict=True):
                state.keep(call.sigma, part.clone())
        if call.given is not None and call.step is not None:
            prediction = sample_of(output).clone()
            cached = CachedStep(kind.guided, call.sigma, call.step, call.given, prediction, call.planned)
            stream.cached.append(cached)
        if stream.guided and kind.guided:
            stream.difference = difference_of(sample_of(output))
        elif not kind.guided:
            assert stream.difference is not None
            output = with_sample(output, both_passes(sample_of(output), stream.difference))
        if kind.computed and stream.cached:
            output = self._correct(output, call, stream, again)
        if call.last:
            self._kept.streams = {key: s for key, s in self._kept.streams.items() if s is not stream}
        return output

    def _correct(self, output: Any, call: Call, stream: Stream, again: Again) -> Any:
        """A computed step's output, made to make up for the cached steps before it."""
        every, stream.cached = stream.cached, []
        if call.step is None:
            return output
        if not call.kind.guided or not all(cached.guided for cached in every):
            every = [cached.conditional() if cached.guided else cached for cached in every]
        try:
            made = [(cached, self._once_more(cached, stream, again)) for cached in every]
        except BaseException:
            self.reset()
            raise
        lost = [(cached.step, cached.prediction - prediction) for cached, prediction in made]
        change = correction(lost, call.step)
        if change is None:
            return output
        self._kept.corrected += len(every)
        sample = sample_of(output)
        if len(change) < len(sample):  # the unconditional pass is taken to be as wrong
            change = torch.cat([change, change])
        return with_sample(output, sample + change)

    def _once_more(self, cached: CachedStep, stream: Stream, again: Again) -> Tensor:
        """What a cached step would have given on the states that are known now."""
        assert self.skipped is not None
        states = stream.states if cached.guided else stream.states[-1:]
        self.skipped.begin(_together([state.between(cached.sigma) for state in states]))
        try:
            return sample_of(again(cached.given, cached.planned))
        finally:
            self.skipped.end()

    def _end(self) -> tuple[Call | None, Tensor | None]:
        call, self._call = self._call, None
        return call, None if self.skipped is None else self.skipped.end()

    def _open(self, unet: Any, reader: RunReader, scheduler: Any) -> None:
        """Plan a run from its first call on, or what is left of one."""
        kept = self._kept
        kept.open, kept.unmatched = True, 0
        kept.streams.clear()
        kept.plan, kept.steps, kept.corrected = {}, [], 0
        ahead = reader.levels[reader.place :: reader.stride]
        kept.sampler = sampler = Sampler(scheduler, reader.levels)
        reason = why_uncached(unet, len(set(ahead)), sampler)
        if reader.guesses:
            reason = (
                "the run's steps are not known (pass elements of scheduler.timesteps to the U-Net, or apply "
                "agentsd to the pipeline)"
            )
        if reason:
            self.words.append(f"agentsd: {reason}; nothing is skipped in this run")
            return
        plan = plan_run(self._steps, self._guidance, ahead, self._residual)
        if all(kind.computed and kind.guided and kind.attention in (PLAIN, FULL) for kind in plan.values()):
            return
        kept.plan = plan
        if self._steps is not None and self._steps.correct:
            if scheduler is None:
                self.words.append(_UNKNOWN)
            elif reader.stride == 1:  # else its steps are not from one call to the next
                steps = sampler.steps()
                kept.steps = steps if any(steps) else []
        if sampler.adds_noise():
            self.words.append(
                f"agentsd: {sampler.name} adds noise in each step, under which caching changes pictures "
                "more; a deterministic sampler loses less"
            )

    def _may_keep(self) -> bool:
        if not torch.is_grad_enabled():
            return True
        self._kept.streams.clear()
        self.words.append(
            "agentsd: gradients are on, under which no layer and no pass is skipped; call the U-Net under "
            "torch.no_grad() to skip some"
        )
        return False

    def _is_off(self, pipe: Any, scheduler: Any) -> bool:
        """Whether the pipeline says that its calls are not two passes of guidance."""
        if scheduler is None or getattr(pipe, "scheduler", None) is not scheduler:  # the calls are another's
            return False
        perturbed = getattr(pipe, "do_perturbed_attention_guidance", False)
        return bool(perturbed) or getattr(pipe, "do_classifier_free_guidance", None) is False

    def _stream(self, given: dict[str, Any], place: int, stride: int, off: bool) -> Stream | None:
        """The calls that this one continues; None if it can't be known."""
        kept, sample, text = self._kept, given["sample"], given.get("encoder_hidden_states")
        # What was not called in the step before is too old to go on from.
        kept.streams = {key: other for key, other in kept.streams.items() if other.place >= place - stride}
        key = (tuple(sample.shape), sample.dtype, sample.device, identity(text))
        stream = kept.streams.get(key)
        if stream is None:
            kept.unmatched += all(other.place < place for other in kept.streams.values())
            if kept.unmatched == 3:
                self._give_up("the U-Net gets another text, or its text as a new tensor, in each call")
                return None
            guided = self._guidance is not None and not off and is_guided(sample, text)
            if self._guidance is not None and not guided and not kept.streams:
                self.words.append(_UNGUIDED)
            stream = kept.streams[key] = Stream(text, guided, self._states(1 + guided))
            stream.residuals = self._residuals(1 + guided)
            return stream
        kept.unmatched = 0
        if stream.place == place:
            self._give_up("the U-Net is called more than once in a step on the same text")
            return None
        return stream

    def _states(self, count: int) -> list[States]:
        order = 0 if self._steps is None else self._steps.extrapolation_order
        kept = 1 + max(order, bool(self._kept.steps))
        return [States(order, kept) for _ in range(count)]

    def _give_up(self, reason: str) -> None:
        self._kept.plan = {}
        self._kept.streams.clear()
        self.words.append(f"agentsd: {reason}; nothing more is skipped in this run")

    def _residuals(self, passes: int) -> Residuals | None:
        if self._residual is None:
            return None
        return Residuals(self._layers, passes, self._residual.extrapolation_order)

    def _possible(self, kind: Kind, stream: Stream, given: dict[str, Any], stages: tuple[int, ...]) -> Kind:
        """What is planned, or more where not enough is known yet."""
        sample = given["sample"]
        guided = kind.guided or not stream.guided or stream.difference is None
        if not guided and (name := unknown_argument(given)):
            self.words.append(
                f"agentsd: a call has {name}, of which it is not known how it is halved; it stays guided"
            )
            guided = True
        if not guided and not stream.halved and not torch.equal(*sample.chunk(2)):
            stream.guided, guided = False, True  # equal pictures at the start, and no guidance
            stream.states, stream.difference, stream.cached = self._states(1), None, []
            stream.residuals = self._residuals(1)
            self.words.append(_UNGUIDED)
        states = stream.states if guided else stream.states[-1:]
        computed, attention = kind.computed or not all(states), kind.attention
        if stream.residuals is not None:
            fits = stream.residuals.fit(stages if guided else stages[len(stages) // 2 :])
            if attention == SHARE and not fits:  # there are none yet, or another operator's
                attention = KEEP if computed and guided else FULL
        return Kind(computed, guided, attention)


def _together(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
