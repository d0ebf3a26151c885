"""How far a picture is from the unaccelerated picture of the same seed."""

import numpy as np
import torch
from PIL import Image
from torchmetrics.functional.image import peak_signal_noise_ratio, structural_similarity_index_measure


def to_tensor(picture: Image.Image) -> torch.Tensor:
    """Return an RGB picture as float32 (1, 3, H, W) in 0..255."""
    pixels = np.array(picture.convert("RGB"), dtype=np.float32)
    return torch.from_numpy(pixels).permute(2, 0, 1)[None]


def psnr(picture: Image.Image, baseline: Image.Image) -> float:
    """Return the peak signal-to-noise ratio in dB; infinite for equal pictures."""
    return float(peak_signal_noise_ratio(to_tensor(picture), to_tensor(baseline), data_range=255.0))


def ssim(picture: Image.Image, baseline: Image.Image) -> float:
    """Return the structural similarity (Wang et al. 2004, 11x11 Gaussian window); 1 for equal pictures."""
    value = structural_similarity_index_measure(to_tensor(picture), to_tensor(baseline), data_range=255.0)
    return float(torch.as_tensor(value))


def mean_abs(picture: Image.Image, baseline: Image.Image) -> float:
    """Return the mean absolute difference in levels of 0..255."""
    return float((to_tensor(picture) - to_tensor(baseline)).abs().mean())
