"""What each call of a run computes: which steps compute all layers, and what attention is in each.

Nothing is cached in a run, and it says so once, where it has fewer than 8 steps, where its scheduler is made
for few (LCM, TCD), where its list of steps is not known or goes up, where an attention processor of an
unknown kind may have to see each call, and where the U-Net is called several times in a step on one text
(panorama's crops). A step is computed where gradients are on, and where what it would need was not kept
(another text or shape).
What is kept is a thread's own, and is let go when the run ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .checks import check, check_types


@dataclass(frozen=True)
class StepCache:
    """Cached steps between computed ones.

    A cached step computes `conv_in`, the last layers of the last up block and what follows it. The hidden
    state that enters those layers comes from the computed steps before ("DeepCache: Accelerating Diffusion
    Models for Free", CVPR 2024, keeps it as it was, as order 0 does). That costs `extrapolation_order + 1`
    features of the finest level for each image and pass, and one more where cached steps are corrected:
    320 x 64 x 64 numbers each in SD 1.5 at 512 px.

    A computed step shows what the cached steps just before it should have had: the state between two computed
    steps. Where they are corrected, the last of them is computed again on that. It tells what all of them got
    wrong, and the computed step's prediction makes up for it (`agentsd.memory.Corrections`).

    A step is a timestep: calls that repeat a timestep (PLMS, Heun) share its decision. A run's first step
    is always computed.

    Attributes:
        interval: a step in so many is computed.
        extrapolation_order: 0 keeps the last state; 1 extrapolates the last two linearly in the noise level
            sigma of Stable Diffusion's training schedule.
        warmup_steps: how many first steps are computed.
        late_interval: intervals grow evenly over the run, from 1 at its first step to this at its end, but
            none is less than `interval`. The last step but one is then not passed over, as what follows the
            last computed step is not corrected. None leaves all at `interval`.
        layers: how many last layers a cached step computes. At 0 it is `conv_norm_out` and what follows it
            alone, on the last hidden state, which Spectrum forecasts, too (Han et al., CVPR 2026).
        correct: cached steps are corrected, where the response of the run's sampler is known.

    Raises:
        TypeError, ValueError: a setting has a wrong type or value.
    """

    interval: int = 2
    extrapolation_order: int = 1
    warmup_steps: int = 1
    late_interval: int | None = None
    layers: int = 1
    correct: bool = True

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("interval", "late_interval"):
            value = getattr(self, name)
            ok = value is None or value >= 1
            check(name, value, ok, "pass 2 (each second step is computed) or more, or 1 for all")
        order, warmup = self.extrapolation_order, self.warmup_steps
        check("extrapolation_order", order, order in (0, 1), "pass 0 (keep) or 1 (extrapolate)")
        check("warmup_steps", warmup, warmup >= 1, "pass 1 or more: a run's first step is computed")
        check("layers", self.layers, self.layers >= 0, "pass 1 (the last layer), more, or 0 for none")

    def computed(self, count: int) -> list[bool]:
        """Whether each step of a run of so many is computed."""
        computed, following = [], 0
        for i in range(count):
            computed.append(i < self.warmup_steps or i == following)
            if computed[-1]:
                following = self._following(i, count)
        return computed

    def _following(self, i: int, count: int) -> int:
        """The computed step after computed step i."""
        if self.late_interval is None:
            return i + self.interval
        grown = round(1 + (self.late_interval - 1) * i / count)
        following, last_but_one = i + max(self.interval, grown), count - 2
        return last_but_one if following > last_but_one > i + 1 else following


OPERATOR, FULL, KEEP, SHARE = "operator", "full", "keep", "share"
"""What a layer computes in a call: its operator, or, under residual sharing, full attention, that and the
operator for the residual between them, or the operator and a residual."""


@dataclass(frozen=True)
class ResidualSharing:
    """Full attention in a few steps, and in the others the operator plus its residual to it.

    From "DiTFastAttn: Attention Compression for Diffusion Transformer Models" (NeurIPS 2024), which does so
    for window attention. In a few steps a layer computes full attention O and its operator's A, and keeps
    R = O - A. In the steps between, it gives A + R: what is left of the operator's bias is how far it changed
    since.

    Tokens are matched once for each operator of a run: of two residuals on maps of their own no line can be
    drawn, and the last one fits no other map. A residual is as large as the layer's output, N x C numbers for
    each layer and image of the batch, and `extrapolation_order + 1` of them are kept.

    Attributes:
        interval: one in so many has full attention of the steps that compute all layers; 1 leaves it to all
            of these.
        warmup_steps: how many steps that compute all layers have it first.
        extrapolation_order: 0 takes the last residual; 1 extrapolates the last two linearly in sigma.
        least_tokens: attention stays full where the finest patched level has fewer tokens.
        interval_from: where that has fewer than these, cached steps alone share, as at interval 1.

    Raises:
        TypeError, ValueError: a setting has a wrong type or value.
    """

    interval: int = 2
    warmup_steps: int = 4
    extrapolation_order: int = 1
    least_tokens: int = 0
    interval_from: int = 0

    def __post_init__(self) -> None:
        check_types(self)
        check(
            "interval", self.interval, self.interval >= 1, "pass 2 (each second step is full) or more, or 1"
        )
        check(
            "warmup_steps",
            self.warmup_steps,
            self.warmup_steps >= 1,
            "pass 1 or more: the first step is full",
        )
        order = self.extrapolation_order
        check("extrapolation_order", order, order in (0, 1), "pass 0 (keep) or 1 (extrapolate)")
        for name in ("least_tokens", "interval_from"):
            value = getattr(self, name)
            check(name, value, value >= 0, "pass 0 (on every grid) or more")

    def on_grid(self, tokens: int) -> ResidualSharing:
        """The settings on a grid of so many tokens at the finest patched level."""
        return self if tokens >= self.interval_from else replace(self, interval=1)

    def plan(self, computed: Sequence[bool]) -> list[str]:
        """What attention computes in each step of a run.

        Args:
            computed: whether each step computes all layers; in the others the last ones share.
        """
        whole = [i for i, all_layers in enumerate(computed) if all_layers]
        warm, later = whole[: self.warmup_steps], whole[self.warmup_steps :]
        full = [*warm, *later[self.interval - 1 :: self.interval]]
        kinds = [FULL if i in full else SHARE for i in range(len(computed))]
        until_next = zip(full, [*full[1:], len(computed)], strict=True)
        used = [SHARE in kinds[i + 1 : end] for i, end in until_next]
        for n, i in enumerate(full):  # a residual is kept if a step uses it before newer ones take its place
            if any(used[n : n + 1 + self.extrapolation_order]):
                kinds[i] = KEEP
        return kinds


@dataclass(frozen=True)
class CallKind:
    """What a call computes.

    Attributes:
        computed: all layers; else it is cached, and computes the last ones.
        attention: what the patched layers compute: "operator", "full", "keep" or "share".
    """

    computed: bool = True
    attention: str = OPERATOR

    @property
    def letter(self) -> str:
        """F or f for a computed or a cached one."""
        return "F" if self.computed else "f"


COMPUTED = CallKind()


@dataclass
class Call:
    """A call of the U-Net: where it is in its run, and what it computes.

    Attributes:
        latent: (B, ..., H, W) what it is called on.
        timestep: its noise level, in training timesteps.
        index: its place on the run's list of timesteps.
        stage: which of the recipe's operators run in it; 0 is the early one.
        begins: it is the first of its run.
        repeats: it has the timestep of the call before, in the same run (PLMS, Heun).
        jumps: it skips timesteps of the list, otherwise than the call before.
        off_list: its timestep is not on the list that it was placed by.
        kind: what it computes.
        inputs: its arguments by name, where something is cached.
        positional: how many of them came without a name.
        sigma: its noise level, as features are kept by.
        output: (B, ...) what a cached call's layers gave, until it is corrected.
        given: (B, ...) what the call gave for that.
    """

    latent: Any
    timestep: float
    index: int
    stage: int = 0
    begins: bool = False
    repeats: bool = False
    jumps: bool = False
    off_list: bool = False
    kind: CallKind = COMPUTED
    inputs: dict[str, Any] = field(default_factory=dict)
    positional: int = 0
    sigma: float | None = None
    output: Any = None
    given: Any = None


def plan_run(
    steps: StepCache | None, step_of_call: Sequence[Any], residual: ResidualSharing | None = None
) -> list[CallKind]:
    """The kind of each call of a run, in its order; calls of one step (PLMS, Heun) are of one kind."""
    number = {step: i for i, step in enumerate(dict.fromkeys(step_of_call))}
    computed = [True] * len(number) if steps is None else steps.computed(len(number))
    attention = [OPERATOR] * len(number) if residual is None else residual.plan(computed)
    kinds = list(map(CallKind, computed, attention))
    return [kinds[number[step]] for step in step_of_call]


def describe(letters: str, corrected: int = 0, attention: str = "") -> str:
    """A line of a run's calls, and their counts.

    Args:
        letters: F for a computed call and f for a cached one.
        corrected: how many cached ones were.
        attention: s for a call with a shared residual, a for another.
    """
    if not letters:
        return "no call yet"
    counts = {"computed": letters.count("F"), "cached": letters.count("f"), "corrected": corrected}
    told = "; ".join(f"{count} {name}" for name, count in counts.items() if count)
    line = f"{letters}  ({len(letters)} calls: {told})"
    shared = attention.count("s")
    return f"{line}; attention {attention}  ({shared} with a shared residual)" if shared else line
