"""Which steps compute all layers of the U-Net; the others compute the last ones on cached features."""

from __future__ import annotations

from dataclasses import dataclass

from ..checks import check, check_types


@dataclass(frozen=True)
class StepCache:
    """Cached steps between computed ones.

    A cached step computes `conv_in`, the last layers of the last up block and what follows it. The hidden
    state that enters those layers comes from the computed steps before ("DeepCache: Accelerating Diffusion
    Models for Free", CVPR 2024, keeps it as it was, as order 0 does). That costs `extrapolation_order + 1`
    features of the finest level for each image and pass: 320 x 64 x 64 numbers each in SD 1.5 at 512 px.

    A computed step shows what the cached steps just before it should have had: the state between two computed
    steps. Where they are corrected, each is computed again on that, and the computed step's prediction
    makes up for what they got wrong (`agentsd.cache.correction`).

    A step is a timestep: calls that repeat a timestep (PLMS, Heun) share its decision. A run's first step
    is always computed.

    Attributes:
        interval: a step in so many is computed; 1 caches none.
        extrapolation_order: 0 keeps the last state; 1 extrapolates the last two linearly in the noise level
            sigma of Stable Diffusion's training schedule.
        warmup_steps: how many first steps are computed.
        late_interval: in place of `interval` in the second half of the steps after those; None is `interval`.
        layers: how many last layers a cached step computes.
        correct: cached steps are corrected, where a step of the run's scheduler is one call.

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
        check("layers", self.layers, self.layers >= 1, "pass 1 (the last layer) or more")

    def computed(self, count: int) -> list[bool]:
        """Whether each step of a run of so many is computed."""
        computed, last = [], -1
        for i in range(count):
            late = self.late_interval if 2 * i >= count + self.warmup_steps else None
            computed.append(i < self.warmup_steps or i - last >= (late or self.interval))
            last = i if computed[-1] else last
        return computed
