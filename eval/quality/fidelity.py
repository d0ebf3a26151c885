"""How far an image is from the unaccelerated image of the same seed."""

import numpy as np
import torch
from PIL import Image
from torchmetrics.functional.image import peak_signal_noise_ratio


def to_tensor(image: Image.Image) -> torch.Tensor:
    """Return an RGB image as float32 (1, 3, H, W) in 0..255."""
    pixels = np.array(image.convert("RGB"), dtype=np.float32)
    return torch.from_numpy(pixels).permute(2, 0, 1)[None]


def psnr(image: Image.Image, baseline: Image.Image) -> float:
    """Return the peak signal-to-noise ratio in dB; infinite for equal images."""
    return float(peak_signal_noise_ratio(to_tensor(image), to_tensor(baseline), data_range=255.0))


def mean_abs(image: Image.Image, baseline: Image.Image) -> float:
    """Return the mean absolute difference in levels of 0..255."""
    return float((to_tensor(image) - to_tensor(baseline)).abs().mean())
