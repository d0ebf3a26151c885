"""Methods that were tried and are beaten by fewer steps: T-GATE, and forecasts of whole U-Net calls."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from diffusers import StableDiffusionPipeline

from ..errors import EvalError
from ..images.other_packages import OTHER_PACKAGES, Applied, forwards_kept
from ..names import METHODS
from .forecast import forecast


def register() -> None:
    """Let `--method` name them, with a number: "tgate-10" and "forecast-2"."""
    METHODS.update({"tgate": 10, "forecast": 2})
    OTHER_PACKAGES.update({"tgate": tgate, "forecast": forecasting})


@contextmanager
def tgate(pipe: Any, gate_step: int) -> Iterator[Applied]:
    """T-GATE by its own package: from `gate_step` on no guidance, and cross-attention's outputs are kept.

    Before the gate, self-attention's outputs are renewed in every fifth step, as the package has it.
    """
    kind: type = type(pipe)
    if kind is not StableDiffusionPipeline:
        raise EvalError(f"T-GATE's package can't run a {kind.__name__}: use a StableDiffusionPipeline")
    from tgate.SD import tgate as call

    with forwards_kept(pipe.unet):
        try:
            yield Applied(partial(call, pipe, gate_step=gate_step))
        finally:
            for module in pipe.unet.modules():
                module.__dict__.pop("cache", None)


@contextmanager
def forecasting(pipe: Any, every: int) -> Iterator[Applied]:
    """Clean latents forecast in place of whole U-Net calls."""
    with forecast(pipe, every):
        yield Applied(pipe)
