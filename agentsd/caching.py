"""Step caching and residual sharing in the calls of a run: what each of them computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import Module

from .attention.processor import LayerState
from .attention.residual import FULL, KEEP, OPERATOR, SHARE, ResidualSharing
from .cache.correction import Corrections
from .cache.features import CachedFeatures
from .cache.plan import COMPUTED, StepKind, plan_run
from .cache.residuals import Residuals
from .cache.skip_layers import SkippedLayers, copy_inputs
from .cache.steps import StepCache
from .cache.support import unsupported_reason
from .context import CacheEntry, StepContext
from .hosts.foreign import Changes, foreign_outside
from .hosts.timesteps import Step
from .run_state import RunState
from .sampler import ImpulseResponse, Sampler, impulse_response

_SKIPS_TIMESTEPS = (
    "agentsd: the U-Net is called on timesteps that skip some of the scheduler's list; what is left of the "
    "run is planned again there, and cached steps are not corrected"
)
_OFF_LIST = (
    "agentsd: a timestep is not one of the scheduler's list, so its call computes all layers; pass elements "
    "of scheduler.timesteps to the U-Net"
)
_UNKNOWN = (
    "agentsd: the timesteps are not those of a scheduler that is known, so cached steps are not corrected; "
    "pass elements of scheduler.timesteps to the U-Net"
)

Recompute: TypeAlias = Callable[[StepContext], Any]
"""Computes a cached step again -> the output."""


class Caching:
    """Skips in a U-Net's calls what a recipe says; what a run keeps is in its `RunState`.

    Args:
        unet: the model.
        steps, residual: the recipe's settings.
        layers: whose residuals are shared.
        warn: warns the user, once of each thing.

    Attributes:
        skipped: the layers that its cached steps skip, where it has any.

    Raises:
        ValueError: the model's blocks are not Stable Diffusion's.
    """

    def __init__(
        self,
        unet: Any,
        steps: StepCache | None,
        residual: ResidualSharing | None,
        layers: Sequence[LayerState],
        warn: Callable[[str], None],
    ) -> None:
        if not hasattr(unet, "up_blocks"):
            raise ValueError(
                f"{type(unet).__name__} is no U-Net, and no layer of it can be skipped: "
                'pass mode="agentsd", or a recipe without steps and residual'
            )
        self._steps, self._residual, self._layers = steps, residual, layers
        self.skipped = None if steps is None else SkippedLayers(unet, steps.layers)
        self._warn = warn

    def begin(self, unet: Module, run: RunState, context: StepContext, step: Step) -> None:
        """Decide what a call computes, and complete its context.

        Args:
            unet: the model.
            run: of the call.
            context: of the call.
            step: where in the run it is.
        """
        self.stop()  # the call before may have died before its end
        if step.first_call or step.skips_timesteps or not run.is_open:
            self._open(unet, run)
            if step.skips_timesteps:
                self._warn(_SKIPS_TIMESTEPS)
        context.kind = COMPUTED if self._residual is None else replace(COMPUTED, attention=FULL)
        if step.off_list and run.kinds:
            self._warn(_OFF_LIST)
        reader, step_index = run.reader, run.reader.step_index
        if step_index not in run.kinds or step.off_list or not self._may_keep(run):
            return
        entry = self._entry(run, context)
        if entry is None:
            return
        context.kind = self._possible(run.kinds[step_index], entry, context)
        context.entry = entry
        context.sigma = run.sampler.sigmas[step_index] if run.sampler.sigmas else None
        context.is_last = step_index + reader.stride >= len(reader.timesteps)
        entry.step_index = step_index

    def skip(self, context: StepContext) -> dict[str, Any]:
        """Skip the layers that a call that `begin` decided on does without; returns its inputs."""
        if context.kind.computed or self.skipped is None or context.entry is None:
            return context.inputs
        self.skipped.begin(context.entry.features.extrapolate(context.sigma)[0])
        context.inputs = self.skipped.without_residuals(context.inputs)
        if context.entry.corrections is not None:
            context.inputs = copy_inputs(context.inputs)
        return context.inputs

    def stop(self) -> Tensor | None:
        """Skip nothing from here on; returns what a computed step had where the last layers begin."""
        return None if self.skipped is None else self.skipped.end()

    def end(self, run: RunState, context: StepContext | None, output: Any, recompute: Recompute) -> Any:
        """What the caller gets for what the U-Net gave; None if it raised."""
        computed = self.stop()
        if output is None:
            run.forget()
        if context is None or output is None or context.entry is None:
            return output
        entry = context.entry
        if computed is not None and context.kind.computed:
            entry.features.keep(context.sigma, [computed.clone()])
        if entry.corrections is not None:
            output = self._correct(run, context, entry, entry.corrections, output, recompute)
        if context.is_last:
            run.entries = {key: other for key, other in run.entries.items() if other is not entry}
            run.changes = run.changes if run.entries else None
        return output

    def _correct(
        self,
        run: RunState,
        context: StepContext,
        entry: CacheEntry,
        corrections: Corrections,
        output: Any,
        recompute: Recompute,
    ) -> Any:
        """What a call gives, so that the sampler gets to where it would have been."""
        assert self.skipped is not None
        sample = sample_of(output)
        if not context.kind.computed:
            given = corrections.make_up(context.index, sample).clone()
            # without its entry, which holds it: both are let go as soon as the entry is
            entry.cached.append(replace(context, entry=None, given=given))
            return with_sample(output, given)
        cached, entry.cached = entry.cached, []
        if cached and self.skipped.feature_hook.compiled:  # as a CUDA graph, whose next call overwrites it
            sample = sample.clone()
        try:
            for one in cached:
                assert one.given is not None
                corrections.note(one.index, one.given, self._recompute(one, entry, recompute))
        except BaseException:
            run.forget()
            raise
        run.history.corrected += len(cached)
        corrected = corrections.correct(context.index, sample)
        return output if corrected is sample and not cached else with_sample(output, corrected)

    def _recompute(self, cached: StepContext, entry: CacheEntry, recompute: Recompute) -> Tensor:
        """(B, ...) what a cached step would have given on the features that are known now."""
        assert self.skipped is not None
        context = replace(cached, entry=entry)
        self.skipped.begin(entry.features.interpolate(cached.sigma)[0])
        try:
            return sample_of(recompute(context))
        finally:
            self.skipped.end()

    def _open(self, unet: Any, run: RunState) -> None:
        """Plan a run from its first call on, or what is left of one."""
        reader, scheduler = run.reader, run.scheduler
        run.is_open, run.unmatched = True, 0
        run.entries.clear()
        run.kinds, run.response, run.changes, run.begin = {}, None, None, reader.step_index
        run.sampler = sampler = Sampler(scheduler, reader.timesteps)
        ahead = range(len(reader.timesteps))[reader.step_index :: reader.stride]
        step_of_call = [sampler.step_of_call[index] for index in ahead]
        reason = unsupported_reason(unet, len(set(step_of_call)), scheduler)
        if reader.guesses:
            reason = (
                "the run's steps are not known (pass elements of scheduler.timesteps to the U-Net, or apply "
                "agentsd to the pipeline)"
            )
        if reason:
            self._warn(f"agentsd: {reason}; nothing is skipped in this run")
            return
        kinds = plan_run(self._steps, step_of_call, self._residual)
        if all(kind.computed and kind.attention in (OPERATOR, FULL) for kind in kinds):
            return
        run.kinds = dict(zip(ahead, kinds, strict=True))
        run.changes = Changes(unet)
        if self._steps is not None and self._steps.correct:
            if scheduler is None:
                self._warn(_UNKNOWN)
            elif watcher := foreign_outside(unet):
                self._warn(f"agentsd: {watcher}, which would see calls twice; cached steps are not corrected")
            elif reader.stride == 1:  # else its steps are not from one call to the next
                run.response = self._response(scheduler, run.begin)

    def _response(self, scheduler: Any, begin: int) -> ImpulseResponse | None:
        """The sampler's, where it has one; says what it means for cached steps."""
        response, name = impulse_response(scheduler, begin), type(scheduler).__name__
        if response is None:
            self._warn(
                f"agentsd: {name} is not linear in what the U-Net gives (clip_sample, thresholding), "
                "so cached steps are not corrected"
            )
        elif response.noisy:
            self._warn(
                f"agentsd: {name} adds noise in each step, under which caching changes images "
                "more; a deterministic sampler loses less"
            )
        return response

    def _may_keep(self, run: RunState) -> bool:
        if not torch.is_grad_enabled():
            return True
        run.entries.clear()
        self._warn(
            "agentsd: gradients are on, under which no layer is skipped; call the U-Net under "
            "torch.no_grad() to skip some"
        )
        return False

    def _entry(self, run: RunState, context: StepContext) -> CacheEntry | None:
        """The cache entry of the calls on this text and shape; None where calls can't be told apart."""
        step_index = run.reader.step_index
        sample, text = context.inputs["sample"], context.inputs.get("encoder_hidden_states")
        oldest = step_index - run.reader.stride  # what was not called in the step before is too old
        run.entries = {key: entry for key, entry in run.entries.items() if entry.step_index >= oldest}
        key = (
            (tuple(sample.shape), sample.dtype, sample.device, _autocast(sample.device.type)),
            (_identity(text), _plain(context.inputs.get("cross_attention_kwargs"))),
            run.changes and run.changes.read(),
        )
        entry = run.entries.get(key)
        if entry is not None and entry.step_index == step_index:
            self._give_up(run, "the U-Net is called more than once in a step on the same text")
            return None
        if entry is not None:
            run.unmatched = 0
            return entry
        if all(entry.step_index < step_index for entry in run.entries.values()):  # the step's first call
            run.unmatched += 1
        if run.unmatched == 3:
            self._give_up(
                run, "the U-Net gets another text or a new tensor of it, or other scales, in each call"
            )
            return None
        order = 0 if self._steps is None else self._steps.extrapolation_order
        count = 1 + max(order, run.response is not None)
        run.entries[key] = entry = CacheEntry(text, CachedFeatures(order, count))
        if run.response is not None and self.skipped is not None:
            entry.corrections = Corrections(run.sampler, run.response, run.begin)
        if self._residual is not None:
            entry.residuals = Residuals(self._layers, self._residual.extrapolation_order)
        return entry

    def _give_up(self, run: RunState, reason: str) -> None:
        run.kinds = {}
        run.entries.clear()
        self._warn(f"agentsd: {reason}; nothing more is skipped in this run")

    def _possible(self, kind: StepKind, entry: CacheEntry, context: StepContext) -> StepKind:
        """What is planned, or more where not enough is known yet."""
        computed, attention = kind.computed or not entry.features, kind.attention
        if entry.residuals is not None and attention == SHARE and not entry.residuals.fit(context.stage):
            attention = KEEP if computed else FULL  # there are none yet, or another operator's
        return StepKind(computed, attention)


def _identity(text: Any) -> Any:
    """What says that a tensor is the same one, unchanged, without a look at its numbers."""
    if not isinstance(text, Tensor):
        return id(text)
    version = 0 if text.is_inference() else text._version
    return text.data_ptr(), text.shape, text.stride(), version


def _autocast(device: str) -> Any:
    """The dtype that autocast computes in now; None without."""
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def _plain(settings: Any) -> Any:
    """The settings of a call that are numbers or words, a LoRA's scale among them."""
    named = settings.items() if isinstance(settings, Mapping) else ()
    return tuple((name, value) for name, value in named if isinstance(value, int | float | str))


def sample_of(output: Any) -> Tensor:
    """The prediction in what a U-Net returns."""
    sample: Tensor = output[0] if isinstance(output, tuple) else output.sample
    return sample


def with_sample(output: Any, sample: Tensor) -> Any:
    """The same with another prediction."""
    if isinstance(output, tuple):
        return (sample, *output[1:])
    return type(output)(sample=sample)
