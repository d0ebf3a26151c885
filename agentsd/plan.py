"""What each call of a run computes: all layers or only the last ones, and which attention.

Whether a run may cache at all is decided in `planning.unsupported_reason`, and whether a call may use what is
stored in `memory.RunCache.memory_of`. There is one cache for each thread and list of timesteps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .checks import check, check_types


@dataclass(frozen=True)
class StepCache:
    """Cached steps between full steps.

    A cached step computes `conv_in`, the last layers of the last up block, and what follows them. The hidden
    state that enters these layers is extrapolated from the full steps before. At order 0 it is kept as
    it was, as in "DeepCache: Accelerating Diffusion Models for Free" (CVPR 2024). That takes memory for
    `extrapolation_order + 1` features of the finest level per image and pass of guidance, and for one more
    if cached steps are corrected: 320 x 64 x 64 numbers each in SD 1.5 at 512 px.

    The next full step shows what the hidden states of the cached steps should have been: the states
    between two full steps. To correct them, the last cached step is computed again on such a state. That
    shows the errors of all of them, and the full step's prediction makes up for these
    (`agentsd.memory.Corrections`).

    A step is a timestep: calls that repeat a timestep (PLMS, Heun) are all full or all cached. A run's
    first step is always full.

    Attributes:
        interval: one step in this many is full.
        extrapolation_order: 0 keeps the last hidden state; 1 extrapolates the last two linearly in the noise
            level sigma of Stable Diffusion's training schedule.
        warmup_steps: how many first steps are full.
        late_interval: if given, intervals grow evenly over the run, from 1 at the first step to this at the
            last, but never below `interval`. The last step but one is then always full, as nothing
            corrects the steps after the last full one.
        layers: how many last layers a cached step computes. At 0 it computes none: the last hidden state
            itself is extrapolated, the state that Spectrum forecasts (Han et al., CVPR 2026).
        correct: whether cached steps are corrected. They can be if the sampler's response is known.

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
            check(name, value, ok, "pass 2 (each second step is full) or more, or 1 for all")
        order, warmup = self.extrapolation_order, self.warmup_steps
        check("extrapolation_order", order, order in (0, 1), "pass 0 (keep) or 1 (extrapolate)")
        check("warmup_steps", warmup, warmup >= 1, "pass 1 or more: a run's first step is full")
        check("layers", self.layers, self.layers >= 0, "pass 1 (the last layer), more, or 0 for none")

    def full_steps(self, count: int) -> list[bool]:
        """Return whether each step of a run of `count` steps is full."""
        full, following = [], 0
        for i in range(count):
            full.append(i < self.warmup_steps or i == following)
            if full[-1]:
                following = self._following(i, count)
        return full

    def _following(self, i: int, count: int) -> int:
        """Return the full step after full step i."""
        if self.late_interval is None:
            return i + self.interval
        grown = round(1 + (self.late_interval - 1) * i / count)
        following, last_but_one = i + max(self.interval, grown), count - 2
        return last_but_one if following > last_but_one > i + 1 else following


OPERATOR, FULL, KEEP, SHARE = "operator", "full", "keep", "share"
"""What a layer computes in a call.

The operator; or, under residual sharing: full attention; full attention and the operator, to keep the
residual between them; or the operator plus a shared residual.
"""


@dataclass(frozen=True)
class ResidualSharing:
    """Full attention in some steps; in the others the operator plus its residual to full attention.

    From "DiTFastAttn: Attention Compression for Diffusion Transformer Models" (NeurIPS 2024), which does this
    for window attention. In some steps a layer computes both full attention O and its operator's output A,
    and keeps the residual R = O - A. In the steps between, it returns A + R. Of the operator's bias only the
    part is left by which it has changed since.

    The tokens of an operator are matched once per run, since residuals on different token maps can be neither
    extrapolated nor reused. A residual is as large as the layer's output, N x C numbers per layer and image
    of the batch, and `extrapolation_order + 1` of them are kept.

    Attributes:
        interval: of the steps that compute all layers, one in this many has full attention; 1 means all.
        warmup_steps: how many of these steps have full attention first.
        extrapolation_order: 0 reuses the last residual; 1 extrapolates the last two linearly in sigma.
        least_tokens: attention stays full if the finest patched level has fewer tokens than this.
        interval_from: with fewer tokens than this, only cached steps share, as at interval 1.

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
        """Return the settings that apply to this many tokens at the finest patched level."""
        return self if tokens >= self.interval_from else replace(self, interval=1)

    def plan(self, computed: Sequence[bool]) -> list[str]:
        """Return what attention computes in each step of a run.

        Args:
            computed: whether each step computes all layers. The last layers share in the other steps.
        """
        whole = [i for i, all_layers in enumerate(computed) if all_layers]
        warm, later = whole[: self.warmup_steps], whole[self.warmup_steps :]
        full = [*warm, *later[self.interval - 1 :: self.interval]]
        kinds = [FULL if i in full else SHARE for i in range(len(computed))]
        until_next = zip(full, [*full[1:], len(computed)], strict=True)
        used = [SHARE in kinds[i + 1 : end] for i, end in until_next]
        for n, i in enumerate(full):  # keep a residual if a step uses it before newer ones replace it
            if any(used[n : n + 1 + self.extrapolation_order]):
                kinds[i] = KEEP
        return kinds


@dataclass(frozen=True)
class CallKind:
    """What a call computes.

    Attributes:
        full: whether it computes all layers. A cached call computes only the last ones.
        attention: what the patched layers compute: "operator", "full", "keep" or "share".
    """

    full: bool = True
    attention: str = OPERATOR

    @property
    def letter(self) -> str:
        """F for a full call, f for a cached one."""
        return "F" if self.full else "f"


FULL_CALL = CallKind()


@dataclass
class Call:
    """A call of the U-Net: its place in the run, and what it computes.

    Attributes:
        latent: (B, ..., H, W) the U-Net's input.
        timestep: the timestep.
        index: its place in the run's list of timesteps.
        stage: which of the recipe's operators runs; 0 is the early one.
        begins: whether it is the first call of its run.
        repeats: whether it has the timestep of the call before, in the same run (PLMS, Heun).
        jumps: whether it skips timesteps of the list in a new way.
        off_list: whether its timestep is missing from the list.
        kind: what it computes.
        inputs: the call's arguments by name, if something is cached.
        positional: how many of them were passed by position.
        sigma: the noise level.
        output: (B, ...) the last layers' output in a cached call, until it is corrected.
        given: (B, ...) what that call returned.
    """

    latent: Any
    timestep: float
    index: int
    stage: int = 0
    begins: bool = False
    repeats: bool = False
    jumps: bool = False
    off_list: bool = False
    kind: CallKind = FULL_CALL
    inputs: dict[str, Any] = field(default_factory=dict)
    positional: int = 0
    sigma: float | None = None
    output: Any = None
    given: Any = None


def plan_run(
    steps: StepCache | None, step_of_call: Sequence[Any], residual: ResidualSharing | None = None
) -> list[CallKind]:
    """Return the kind of each call of a run, in order; the calls of one step (PLMS, Heun) have one kind."""
    number = {step: i for i, step in enumerate(dict.fromkeys(step_of_call))}
    full = [True] * len(number) if steps is None else steps.full_steps(len(number))
    attention = [OPERATOR] * len(number) if residual is None else residual.plan(full)
    kinds = list(map(CallKind, full, attention))
    return [kinds[number[step]] for step in step_of_call]


def describe(letters: str, corrected: int = 0, attention: str = "") -> str:
    """Return a run's calls as a line of letters, with counts.

    Args:
        letters: F for a full call, f for a cached one.
        corrected: how many cached calls were corrected.
        attention: s for a call with a shared residual, a for any other.
    """
    if not letters:
        return "no call yet"
    counts = {"full": letters.count("F"), "cached": letters.count("f"), "corrected": corrected}
    told = "; ".join(f"{count} {name}" for name, count in counts.items() if count)
    line = f"{letters}  ({len(letters)} calls: {told})"
    shared = attention.count("s")
    return f"{line}; attention {attention}  ({shared} with a shared residual)" if shared else line
