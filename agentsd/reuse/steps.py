"""Which steps compute the whole U-Net; the others compute its last layers on states kept from those."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ..checks import check, check_types


@dataclass(frozen=True)
class ReuseSteps:
    """Cheap steps between full ones.

    A cheap call computes `conv_in`, the last layers of the last up block and what follows it. The hidden
    state that enters those layers comes from the full calls before ("DeepCache: Accelerating Diffusion
    Models for Free", CVPR 2024, keeps it as it was, as order 0 does). That costs `order + 1` states of the
    finest level for each picture and pass: 320 x 64 x 64 numbers each in SD 1.5 at 512 px.

    A full call shows what the cheap calls just before it should have had: the state between two full calls.
    Where they are corrected, each is computed once more on that, and the full call's prediction makes up for
    what they got wrong (`agentsd.reuse.correction`).

    A step is a noise level: calls that repeat a timestep (PLMS, Heun) share its decision. A run's first step
    is always full.

    Attributes:
        every: a step in so many is full; 1 leaves nothing out.
        order: 0 keeps the last state; 1 extrapolates the last two linearly in the noise level sigma of Stable
            Diffusion's training schedule.
        first: how many first steps are full.
        late_every: in place of `every` in the second half of the steps after those; None is `every`.
        layers: how many last layers a cheap call computes.
        corrected: cheap calls are corrected, where a step of the run's scheduler is one call.
        at: in place of `every`, the noise levels of the full steps, as training timesteps (999 is the
            noisiest): of a run's own steps the nearest to each is full, so that a list serves any number of
            steps.

    Raises:
        TypeError, ValueError: a setting has a wrong type or value.
    """

    name: ClassVar[str] = "reuse"

    every: int = 2
    order: int = 1
    first: int = 1
    late_every: int | None = None
    layers: int = 1
    corrected: bool = True
    at: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("every", "late_every"):
            value = getattr(self, name)
            ok = value is None or value >= 1
            check(name, value, ok, "pass 2 (each second step is full) or more, or 1 for all")
        check("order", self.order, self.order in (0, 1), "pass 0 (keep) or 1 (extrapolate)")
        check("first", self.first, self.first >= 1, "pass 1 or more: a run's first step is full")
        check("layers", self.layers, self.layers >= 1, "pass 1 (the last layer) or more")
        if self.at is not None:
            object.__setattr__(self, "at", check_levels("at", self.at))
            for name in ("every", "late_every"):
                value = getattr(self, name)
                ok = value == getattr(type(self), name)
                check(name, value, ok, f"`at` names the full steps: leave {name} out")

    def full(self, levels: Sequence[float]) -> list[bool]:
        """Whether each step of a run on these noise levels, in its order, is full."""
        count = len(levels)
        full = set(range(min(self.first, count)))
        if self.at is not None:
            full |= nearest(self.at, levels, range(count))
            return [i in full for i in range(count)]
        last = self.first - 1
        for i in range(self.first, count):
            late = self.late_every if 2 * i >= count + self.first else None
            if i - last >= (late or self.every):
                full.add(i)
                last = i
        return [i in full for i in range(count)]


def check_levels(name: str, levels: object) -> tuple[float, ...]:
    """Noise levels as a tuple; raises ValueError for what is none."""
    way_out = "pass timesteps such as (999, 750, 500, 250)"
    check(name, levels, isinstance(levels, list | tuple) and len(levels) > 0, way_out)
    assert isinstance(levels, list | tuple)
    numbers = all(isinstance(x, int | float) and type(x) is not bool and x == x for x in levels)
    check(name, levels, numbers, way_out)
    return tuple(levels)


def nearest(wanted: Sequence[float], levels: Sequence[float], among: Sequence[int]) -> set[int]:
    """For each wanted noise level the one of these steps that is nearest to it."""
    return {min(among, key=lambda i: abs(levels[i] - level)) for level in wanted}
