"""A run whose calls leave layers or the unconditional pass out: what each of them computes."""

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
from .correction import Cheap, correction
from .guidance import ReuseGuidance
from .halves import (
    both_halves,
    conditional_arguments,
    difference_of,
    is_guided,
    sample_of,
    unknown_argument,
    with_sample,
)
from .left_out import LeftOut
from .plan import WHOLE, Kind, plan_run
from .residuals import Residuals
from .states import States
from .steps import ReuseSteps
from .streams import Kept, Stream, identity
from .suited import why_whole

_JUMPS = (
    "agentsd: the U-Net is called on timesteps that skip some of the scheduler's list; what is left of the "
    "run is planned anew there, and cheap calls are not corrected"
)
_OFF_LIST = (
    "agentsd: a timestep is not one of the scheduler's list, so its call is computed in whole; pass elements "
    "of scheduler.timesteps to the U-Net"
)
_UNKNOWN = (
    "agentsd: the timesteps are not those of a scheduler that is known, so cheap calls are not corrected; "
    "pass elements of scheduler.timesteps to the U-Net"
)
_UNGUIDED = "agentsd: no guidance of two passes was found in a call, so none was halved"

Again: TypeAlias = Callable[[dict[str, Any], Any], Any]
"""Computes a cheap call once more: its arguments, what its attention was planned from -> the output."""


@dataclass
class Call:
    """The call under way.

    Attributes:
        kind: what it computes.
        sigma: its noise level, as states are kept by.
        stream: where its states are kept; None if they are not.
        last: it is in the last step of its run.
        step: what its sampler's step makes of it, where cheap calls are corrected.
        given, planned: of a cheap call that is to be corrected, as in `Cheap`.
    """

    kind: Kind
    sigma: float | None = None
    stream: Stream | None = None
    last: bool = False
    step: SigmaStep | None = None
    given: dict[str, Any] | None = None
    planned: Any = None


class Reuse:
    """Leaves out of a U-Net's calls what a recipe says.

    Args:
        unet: the model.
        steps, guidance, residual: the recipe's settings.
        layers: whose residuals are shared.

    Attributes:
        left_out: the layers that its cheap calls leave out, where it has any.
        words: what the user is to be told, a line each, since this was last emptied.

    Raises:
        ValueError: the model's blocks are not Stable Diffusion's.
    """

    def __init__(
        self,
        unet: Any,
        steps: ReuseSteps | None,
        guidance: ReuseGuidance | None,
        residual: ResidualSharing | None = None,
        layers: Sequence[LayerState] = (),
    ) -> None:
        if not hasattr(unet, "up_blocks"):
            raise ValueError(
                f"{type(unet).__name__} is no U-Net, and no call of it can be left out: "
                'pass mode="paper", or a recipe without steps, guidance and residual'
            )
        self._steps, self._guidance, self._residual, self._layers = steps, guidance, residual, layers
        self.left_out = None if steps is None else LeftOut(unet, steps.layers)
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
        """How many cheap calls of the thread's run were."""
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
            What it computes, and its arguments, halved where it is half.
        """
        self._end()  # a call that died
        kept = self._kept
        if step.opens or step.jumps or not kept.open:
            self._open(unet, reader, scheduler)
            if step.jumps:
                self.words.append(_JUMPS)
        place = reader.place
        alone = WHOLE if self._residual is None else replace(WHOLE, attention=FULL)
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
        if not kind.whole:
            stream.halved = True
            given = conditional_arguments(given)
        return kind, given

    def start(self, given: dict[str, Any], planned: Any) -> dict[str, Any]:
        """Leave out the layers of the call that `begin` decided on; returns its arguments.

        Args:
            given: its arguments by name.
            planned: what its attention is planned from; handed back where it is computed once more.
        """
        call = self._call
        if call is None or call.kind.full or self.left_out is None or call.stream is None:
            return given
        states = call.stream.states if call.kind.whole else call.stream.states[-1:]
        self.left_out.begin(_together([state.at(call.sigma) for state in states]))
        given = self.left_out.without_residuals(given)
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
        if kind.full and seen is not None:
            states = stream.states if kind.whole else stream.states[-1:]
            for state, part in zip(states, seen.chunk(len(states)), strict=True):
                state.keep(call.sigma, part.clone())
        if call.given is not None and call.step is not None:
            prediction = sample_of(output).clone()
            cheap = Cheap(kind.whole, call.sigma, call.step, call.given, prediction, call.planned)
            stream.cheap.append(cheap)
        if stream.guided and kind.whole:
            stream.difference = difference_of(sample_of(output))
        elif not kind.whole:
            assert stream.difference is not None
            output = with_sample(output, both_halves(sample_of(output), stream.difference))
        if kind.full and stream.cheap:
            output = self._correct(output, call, stream, again)
        if call.last:
            self._kept.streams = {key: s for key, s in self._kept.streams.items() if s is not stream}
        return output

    def _correct(self, output: Any, call: Call, stream: Stream, again: Again) -> Any:
        """A full call's output, made to make up for the cheap calls before it."""
        every, stream.cheap = stream.cheap, []
        if call.step is None:
            return output
        if not call.kind.whole or not all(cheap.whole for cheap in every):
            every = [cheap.conditional() if cheap.whole else cheap for cheap in every]
        try:
            made = [(cheap, self._once_more(cheap, stream, again)) for cheap in every]
        except BaseException:
            self.reset()
            raise
        lost = [(cheap.step, cheap.prediction - prediction) for cheap, prediction in made]
        change = correction(lost, call.step)
        if change is None:
            return output
        self._kept.corrected += len(every)
        sample = sample_of(output)
        if len(change) < len(sample):  # the unconditional pass is taken to be as wrong
            change = torch.cat([change, change])
        return with_sample(output, sample + change)

    def _once_more(self, cheap: Cheap, stream: Stream, again: Again) -> Tensor:
        """What a cheap call would have given on the states that are known now."""
        assert self.left_out is not None
        states = stream.states if cheap.whole else stream.states[-1:]
        self.left_out.begin(_together([state.between(cheap.sigma) for state in states]))
        try:
            return sample_of(again(cheap.given, cheap.planned))
        finally:
            self.left_out.end()

    def _end(self) -> tuple[Call | None, Tensor | None]:
        call, self._call = self._call, None
        return call, None if self.left_out is None else self.left_out.end()

    def _open(self, unet: Any, reader: RunReader, scheduler: Any) -> None:
        """Plan a run from its first call on, or what is left of one."""
        kept = self._kept
        kept.open, kept.unmatched = True, 0
        kept.streams.clear()
        kept.plan, kept.steps, kept.corrected = {}, [], 0
        ahead = reader.levels[reader.place :: reader.stride]
        kept.sampler = sampler = Sampler(scheduler, reader.levels)
        whole = why_whole(unet, len(set(ahead)), sampler)
        if reader.guesses:
            whole = (
                "the run's steps are not known (pass elements of scheduler.timesteps to the U-Net, or apply "
                "agentsd to the pipeline)"
            )
        if whole:
            self.words.append(f"agentsd: {whole}; nothing is left out of this run")
            return
        plan = plan_run(self._steps, self._guidance, ahead, self._residual)
        if all(kind.full and kind.whole and kind.attention in (PLAIN, FULL) for kind in plan.values()):
            return
        kept.plan = plan
        if self._steps is not None and self._steps.corrected:
            if scheduler is None:
                self.words.append(_UNKNOWN)
            elif reader.stride == 1:  # else its steps are not from one call to the next
                steps = sampler.steps()
                kept.steps = steps if any(steps) else []
        if sampler.adds_noise():
            self.words.append(
                f"agentsd: {sampler.name} adds noise in each step, which reuse changes pictures more under; "
                "a deterministic sampler loses less"
            )

    def _may_keep(self) -> bool:
        if not torch.is_grad_enabled():
            return True
        self._kept.streams.clear()
        self.words.append(
            "agentsd: gradients are on, under which no call is left out or halved; call the U-Net under "
            "torch.no_grad() to leave some out"
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
        order = 0 if self._steps is None else self._steps.order
        kept = 1 + max(order, bool(self._kept.steps))
        return [States(order, kept) for _ in range(count)]

    def _give_up(self, reason: str) -> None:
        self._kept.plan = {}
        self._kept.streams.clear()
        self.words.append(f"agentsd: {reason}; nothing more is left out of this run")

    def _residuals(self, passes: int) -> Residuals | None:
        if self._residual is None:
            return None
        return Residuals(self._layers, passes, self._residual.extrapolation_order)

    def _possible(self, kind: Kind, stream: Stream, given: dict[str, Any], stages: tuple[int, ...]) -> Kind:
        """What is planned, or more where not enough is known yet."""
        sample = given["sample"]
        whole = kind.whole or not stream.guided or stream.difference is None
        if not whole and (name := unknown_argument(given)):
            self.words.append(
                f"agentsd: a call has {name}, of which it is not known how it is halved; it stays whole"
            )
            whole = True
        if not whole and not stream.halved and not torch.equal(*sample.chunk(2)):
            stream.guided, whole = False, True  # equal pictures at the start, and no guidance
            stream.states, stream.difference, stream.cheap = self._states(1), None, []
            stream.residuals = self._residuals(1)
            self.words.append(_UNGUIDED)
        states = stream.states if whole else stream.states[-1:]
        full, attention = kind.full or not all(states), kind.attention
        if stream.residuals is not None:
            fits = stream.residuals.fit(stages if whole else stages[len(stages) // 2 :])
            if attention == SHARE and not fits:  # there are none yet, or another operator's
                attention = KEEP if full and whole else FULL
        return Kind(full, whole, attention)


def _together(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
