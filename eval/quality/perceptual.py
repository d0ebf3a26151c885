"""How different two images look: squared differences of a network's features at several scales."""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from .features import SIDE, Sources, efficientnet_lite0, network_input, open_image

STAGES = (0, 2, 4, 10, 15)
"""Blocks of EfficientNet-Lite0 whose outputs are compared: the last ones at strides 2, 4, 8, 16 and 32."""
_BATCH = 16


class StageFeatures:
    """Images to the features of five stages of EfficientNet-Lite0, each of length 1 at every place."""

    def __init__(self, device: torch.device) -> None:
        self._network = efficientnet_lite0(device)
        self._device = device

    @torch.inference_mode()
    def __call__(self, images: Sequence[Image.Image]) -> list[Tensor]:
        """Return a tensor (B, C, h, w) for each stage."""
        pixels = (network_input(images, SIDE).to(self._device) - 127) / 128
        return [F.normalize(stage, dim=1) for stage in self._stages(pixels)]

    def _stages(self, pixels: Tensor) -> Iterator[Tensor]:
        network = self._network
        hidden = network._swish(network._bn0(network._conv_stem(pixels)))
        for number, block in enumerate(network._blocks):
            hidden = block(hidden)
            if number in STAGES:
                yield hidden


def stage_distance(a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
    """Return the perceptual distance (B,) of stages (B, C, h, w): 0 for equal images, at most 4.

    The squared difference of channels of length 1, a mean over the places of a stage and over the stages, as
    in LPIPS (Zhang et al. 2018, Eq. 1) with all its weights equal.
    """
    return torch.stack(
        [(one - other).square().sum(1).mean((1, 2)) for one, other in zip(a, b, strict=True)]
    ).mean(0)


class PerceptualFeatures:
    """Stage features of many images, in half precision: about 0.7 MB each."""

    def __init__(self, features: StageFeatures, sources: Sources) -> None:
        self._parts = []
        for start in range(0, len(sources), _BATCH):
            stages = features([open_image(one) for one in sources[start : start + _BATCH]])
            self._parts.append([stage.half().cpu() for stage in stages])

    def distance(self, other: "PerceptualFeatures") -> list[float]:
        """Return the perceptual distance of each image to the other's of the same place; 0 if equal."""
        found: list[float] = []
        for ours, theirs in zip(self._parts, other._parts, strict=True):
            floats = [[stage.float() for stage in stages] for stages in (ours, theirs)]
            found += stage_distance(*floats).tolist()
        return found
