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


def correction(steps: Sequence[SigmaStep], errors: Sequence[Tensor], now: SigmaStep) -> Tensor | None:
    """What a computed step's prediction (B, ...) changes by to make up for the cached steps just before it.

    With rho = sigma' / sigma and a = rho + (1 - rho) v / (v + sigma**2) of each step (DPM-Solver++, Eq. 9),
    the latent is off by m = (1 - rho) c_out error + a m, and the change is -a m / ((1 - rho) c_out) of `now`.

    Args:
        steps: the sampler's cached steps, in their order.
        errors: (B, ...) each step's prediction minus the right one.
        now: the computed step.

    Returns:
        None where there were no steps.
    """
    latent_error: Tensor | None = None
    for step, error in zip(steps, errors, strict=True):
        own = (1 - step.kept) * step.c_out * error
        latent_error = own if latent_error is None else own + step.carried * latent_error
    if latent_error is None:
        return None
    return -now.carried / (1 - now.kept) / now.c_out * latent_error
