"""What the outputs given in a run are wrong by, and what takes the sampler to where it would have been.

A cached step's hidden state is extrapolated from computed steps before it. The next computed step shows the
state on the other side: on the state between, the same layers tell how wrong the output was. By then the
sampler has moved the latent by it. With R the sampler's impulse response (`agentsd.sampler`), the latent of
call n is off by the sum of R[n, j] wrong[j]. So call n gives

    best - sum_{j<n} R[n + 1, j] wrong[j] / R[n + 1, n]

and the next latent is right, to rounding, whatever the sampler; so does every call after it, as multistep
samplers keep what they were given. What was wrong with the latent of call n itself has moved its output: by
dF/dx of Gaussian data, which `best` is without.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from ..sampler import ImpulseResponse, Sampler


class Corrections:
    """The errors of one text's outputs in a run.

    Args:
        sampler: of the run.
        response: its impulse response.
        begin: the index of the run's first call.
    """

    def __init__(self, sampler: Sampler, response: ImpulseResponse, begin: int) -> None:
        self._sampler, self._response = sampler, response
        self._since = begin  # the last call whose latent was right
        self._wrong: dict[int, Tensor] = {}  # (B, ...) by call: what it gave less what is right

    def note(self, call: int, given: Tensor, output: Tensor) -> None:
        """Take in what a cached call gave, and what its layers give on the features that are known now."""
        self._wrong[call] = given - self._best(call, output)

    def correct(self, call: int, output: Tensor) -> Tensor:
        """What a computed call (B, ...) gives, all calls before it being noted: the next latent is right."""
        best, change = self._best(call, output), self._change(call)
        if change is None:
            return best
        self._wrong[call] = change
        self._since = call + 1
        shown = np.any(self._response.weights(slice(call + 2, None), self._since), axis=0)
        self._wrong = {one: wrong for one, wrong in self._wrong.items() if shown[one]}
        return best + change

    def make_up(self, call: int, output: Tensor) -> Tensor:
        """What a cached call (B, ...) gives: its output, less what is wrong in the sampler's history."""
        change = self._change(call)
        return output if change is None else output + change

    def _best(self, call: int, output: Tensor) -> Tensor:
        """An output as it would be on the right latent."""
        gain = self._sampler.gain(call) * float(self._response.input_scale[call])
        error = self._sum(gain * self._response.weights(call, self._since))
        return output if error is None else output - error

    def _change(self, call: int) -> Tensor | None:
        """What a call's output changes by to make up for all that is wrong before it."""
        weights = self._response.weights(call + 1, self._since)
        own, weights[call] = weights[call], 0.0
        return self._sum(weights / -own) if own else None  # a last step may move nothing

    def _sum(self, weights: np.ndarray) -> Tensor | None:
        """The errors so far, weighted; None where there are none."""
        total: Tensor | None = None
        for call, wrong in self._wrong.items():
            if weight := float(weights[call]):
                total = wrong * weight if total is None else total.add(wrong, alpha=weight)
        return total
