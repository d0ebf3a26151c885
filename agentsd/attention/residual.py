"""Residual sharing: what an operator misses of full attention, kept from the last step that computed both.

From "DiTFastAttn: Attention Compression for Diffusion Transformer Models" (NeurIPS 2024), which does so for
window attention. In a few steps a layer computes full attention O and its operator's A, and keeps R = O - A.
In the steps between, it gives A + R: what is left of the operator's bias is how far it changed since.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..checks import check, check_types

OPERATOR, FULL, KEEP, SHARE = "operator", "full", "keep", "share"
"""What a layer computes in a call: its operator, or, under residual sharing, full attention, that and the
operator for the residual between them, or the operator and a residual."""


@dataclass(frozen=True)
class ResidualSharing:
    """Full attention in a few steps, and in the others the operator plus its residual to it.

    Tokens are matched once for each operator of a run: of two residuals on maps of their own no line can be
    drawn, and the last one fits no other map. A residual is as large as the layer's output, N x C numbers for
    each layer and image of the batch, and `extrapolation_order + 1` of them are kept.

    Attributes:
        interval: one in so many has full attention of the steps that compute all layers; 1 leaves it to all
            of these.
        warmup_steps: how many steps that compute all layers have it first.
        extrapolation_order: 0 takes the last residual; 1 extrapolates the last two linearly in sigma.
        least_tokens: attention stays full where the finest patched level has fewer tokens.

    Raises:
        TypeError, ValueError: a setting has a wrong type or value.
    """

    interval: int = 2
    warmup_steps: int = 4
    extrapolation_order: int = 1
    least_tokens: int = 0

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
        check(
            "least_tokens", self.least_tokens, self.least_tokens >= 0, "pass 0 (share on every grid) or more"
        )

    def plan(self, computed: Sequence[bool]) -> list[str]:
        """What attention computes in each step of a run.

        Args:
            computed: whether each step computes all layers; in the others the last ones share.
        """
        warm = [i for i, all_layers in enumerate(computed) if all_layers][: self.warmup_steps]
        ends, gap = [], 0  # the steps of full attention that can leave a residual
        for i, all_layers in enumerate(computed):
            if all_layers:
                gap = 0 if i in warm else (gap + 1) % self.interval
                ends += [i] if gap == 0 else []
        kinds = [FULL if i in warm else SHARE for i in range(len(computed))]
        used = [
            SHARE in kinds[i + 1 : after] for i, after in zip(ends, [*ends[1:], len(computed)], strict=True)
        ]
        for n, i in enumerate(ends):  # a residual is kept if a step uses it before newer ones take its place
            kinds[i] = KEEP if any(used[n : n + 1 + self.extrapolation_order]) else FULL
        return kinds
