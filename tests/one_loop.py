"""The method in one loop: corrected step caching under any sampler that is linear in the model's output.

No threads, no runs. Two functions stand for a model that predicts noise, and a step is one call. The rest of
`agentsd`'s step caching finds these two functions in a live pipeline.
"""

from copy import deepcopy
from math import prod

import torch


def denoise(deep, last, scheduler, x, full):
    """Sample from `x` and return the final latents.

    Args:
        deep: the hidden state that enters the model's last layers, of an input and a timestep.
        last: what the last layers make of an input, a timestep and that state.
        scheduler: a diffusers scheduler that is set to its timesteps.
        full: for each step, whether all layers are computed; else it is cached.
    """
    response, sigmas = impulse_response(scheduler), noise_levels(scheduler)
    kept, cached = [], []  # (sigma, state) of the last full steps; cached steps since the last of them
    errors = {}  # by step: the output that it gave minus the right one

    def off(n):  # how far the latent of step n is from where right outputs would have taken it
        return sum(float(response[n, j]) * errors[j] for j in errors)

    def right(n, output, scale):  # an output as it would be on the right latent, by dF/dx of Gaussian data
        return output - sigmas[n] / (1 + sigmas[n] ** 2) ** 0.5 * scale * off(n)

    for n, t in enumerate(scheduler.timesteps):
        seen = scheduler.scale_model_input(x, t)
        scale = float(scheduler.scale_model_input(torch.ones(1, dtype=torch.float64), t))
        if full[n]:
            state = deep(seen, t)
            output = last(seen, t, state)
            kept = [*kept, (sigmas[n], state)][-3:]
            if cached:
                # The state is now known on both sides of the cached steps. So interpolate it at the last of
                # them, and compute that step again.
                i, at, t_i, _, before, _ = cached[-1]
                moved = last(at, t_i, polynomial(kept, sigmas[i])) - before
                for j, _, _, scale_j, out, gave in cached:
                    share = min(1.0, newton_term(kept, sigmas[j]) / newton_term(kept, sigmas[i]))
                    errors[j] = gave - right(j, out + share * moved, scale_j)
            output, cached = right(n, output, scale), []
        else:
            output = last(seen, t, polynomial(kept[-2:], sigmas[n]))
        own = float(response[n + 1, n])
        given = output - off(n + 1) / own if own else output  # so that the next latent is right
        if full[n]:
            errors[n] = given - output
        else:
            cached.append((n, seen, t, scale, output, given))
        x = scheduler.step(given, t, x).prev_sample
    return x


def polynomial(kept, sigma):
    """The state at a noise level on the polynomial through those kept: 2 extrapolate, 3 interpolate."""
    levels = [level for level, _ in kept]
    weights = [prod((sigma - b) / (a - b) for b in levels if b != a) for a in levels]
    return sum(weight * state for weight, (_, state) in zip(weights, kept, strict=True))


def newton_term(kept, sigma):
    """How far the last state moved that polynomial at a level, but for a factor that all levels share."""
    return prod(sigma - level for level, _ in kept[:-1])


def impulse_response(scheduler):
    """R[n, j]: what a unit of the output of step j adds to the latent of step n."""
    copy, calls = deepcopy(scheduler), len(scheduler.timesteps)
    latents, units = [torch.zeros(1, calls, dtype=torch.float64)], torch.eye(calls, dtype=torch.float64)
    for j, t in enumerate(copy.timesteps):
        copy.scale_model_input(latents[-1], t)
        latents.append(copy.step(units[j : j + 1], t, latents[-1]).prev_sample)
    return torch.cat(latents)


def noise_levels(scheduler):
    """Sigma of each step, of latents that are data + sigma noise."""
    if hasattr(scheduler, "sigmas"):
        return scheduler.sigmas[:-1].tolist()
    kept = scheduler.alphas_cumprod[scheduler.timesteps.long()]
    return ((1 - kept) / kept).sqrt().tolist()
