"""What cheap calls got wrong, and the full call after them that makes up for it.

A cheap call's hidden state is extrapolated from full calls before it. The next full call shows the state on
the other side: on the state between, the same layers tell how wrong the prediction was. By then the sampler
has moved the latent by it. So the full call's prediction is changed to take its own step to where the sampler
would have been.

Predictions are turned into denoised latents D, and latents into y = x / alpha, whose noise level is sigma.
A first-order step from sigma to sigma' is y' = rho y + (1 - rho) D with rho = sigma' / sigma (DDIM;
DPM-Solver++, Lu et al. 2022, Eq. 9). So an error e of D moves y by (1 - rho) e, and an error of y is carried
through a step by rho + (1 - rho) dD/dy, where dD/dy = 1 / (1 + sigma**2) for data of unit variance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

from torch import Tensor

from .halves import conditional_half
from .states import sigma

_OTHERWISE = ("Singlestep", "PNDM")  # several calls a step, or calls that share in several steps


class Levels(NamedTuple):
    """The noise levels sigma of a step's call and of where its sampler goes from there."""

    here: float
    after: float

    @property
    def kept(self) -> float:
        """Share of the latent in what a step makes."""
        return self.after / self.here

    @property
    def carried(self) -> float:
        """What becomes of an error of the latent in a step."""
        return self.kept + (1 - self.kept) / (1 + self.here**2)

    def denoised(self, prediction_type: str) -> float:
        """How far a denoised latent moves with the model's prediction."""
        if prediction_type == "sample":
            return 1.0
        return -self.here if prediction_type == "epsilon" else -self.here / (1 + self.here**2) ** 0.5


@dataclass
class Cheap:
    """A cheap call that the next full one is to make up for.

    Attributes:
        whole: it computed both passes of guidance, or there is one.
        level: its timestep.
        levels: its noise level and that of the next step.
        given: its arguments by name.
        prediction: (B, ...) what it gave for those.
        planned: what its attention was planned from.
    """

    whole: bool
    level: float
    levels: Levels
    given: dict[str, Any]
    prediction: Tensor
    planned: Any

    def conditional(self) -> Cheap:
        """The half call in a whole one."""
        batch = self.given["sample"].shape[0]
        given = {name: conditional_half(value, batch) for name, value in self.given.items()}
        given["sample"] = given["sample"].clone()  # a view would be another graph under torch.compile
        return replace(self, whole=False, given=given, prediction=conditional_half(self.prediction, batch))


def levels_of(timesteps: Sequence[float], scheduler: Any) -> list[Levels] | None:
    """The noise levels of each step of a run; None where a call is not a step to a lower level.

    PLMS repeats a step, and four calls share in each of its steps: it is left uncorrected too.

    Args:
        timesteps: the run's list.
        scheduler: of the run, or None: Stable Diffusion's training schedule then.
    """
    name = type(scheduler).__name__
    if getattr(scheduler, "order", 1) > 1 or any(word in name for word in _OTHERWISE):
        return None
    own = getattr(scheduler, "sigmas", None)  # timesteps may be rounded
    if isinstance(own, Tensor) and len(own) == len(timesteps) + 1:
        sigmas = own.double().tolist()
    else:
        sigmas = [*map(sigma, timesteps), 0.0]
    levels = [Levels(here, after) for here, after in pairwise(sigmas)]
    return levels if all(level.after < level.here for level in levels) else None


def correction(lost: Sequence[tuple[Levels, Tensor]], now: Levels, prediction_type: str) -> Tensor | None:
    """What a full call's prediction (B, ...) changes by to make up for the calls just before it.

    Args:
        lost: what each of these predicted too much (B, ...), in their order, one a step.
        now: of the full call.
        prediction_type: as diffusers' schedulers name it.

    Returns:
        None where there were none.
    """
    moved: Tensor | None = None
    for levels, error in lost:
        step = (1 - levels.kept) * levels.denoised(prediction_type) * error
        moved = step if moved is None else step + levels.carried * moved
    if moved is None:
        return None
    return -now.carried / (1 - now.kept) / now.denoised(prediction_type) * moved
