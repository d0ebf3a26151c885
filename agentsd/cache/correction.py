"""What cached steps got wrong, and the computed step after them that makes up for it.

A cached step's hidden state is extrapolated from computed steps before it. The next computed step shows the
state on the other side: on the state between, the same layers tell how wrong the prediction was. By then the
sampler has moved the latent by it. So the computed step's prediction is changed to take its own step to where
the sampler would have been.

Predictions are turned into denoised latents D, and latents into y = x / alpha, whose noise level is sigma.
A first-order step from sigma to sigma' is y' = rho y + (1 - rho) D with rho = sigma' / sigma (DDIM;
DPM-Solver++, Lu et al. 2022, Eq. 9). So an error e of D moves y by (1 - rho) e, and an error of y is carried
through a step by rho + (1 - rho) dD/dy, where dD/dy = v / (v + sigma**2) for Gaussian data of variance v
(`agentsd.hosts.schedulers.SigmaStep`).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..hosts.schedulers import SigmaStep


def correction(lost: Sequence[tuple[SigmaStep, Tensor]], now: SigmaStep) -> Tensor | None:
    """What a computed step's prediction (B, ...) changes by to make up for the calls just before it.

    Args:
        lost: what each of these predicted too much (B, ...), in their order, one a step.
        now: of the computed step.

    Returns:
        None where there were none.
    """
    moved: Tensor | None = None
    for step, error in lost:
        own = (1 - step.kept) * step.c_out * error
        moved = own if moved is None else own + step.carried * moved
    if moved is None:
        return None
    return -now.carried / (1 - now.kept) / now.c_out * moved
