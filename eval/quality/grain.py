"""Grain: how much of a picture lies in its finest details."""

import numpy as np
from PIL import Image

_LUMA = np.array([0.299, 0.587, 0.114])


def grain(image: Image.Image) -> float:
    """Return the power in the highest octave, in squared levels of 0..255, a mean over the pixels.

    The luminance is seen through a Hann window, so that the picture's edges don't count; its highest octave
    are the frequencies of more than a quarter of a cycle a pixel along either axis.
    """
    luma = np.asarray(image.convert("RGB"), dtype=np.float64) @ _LUMA
    rows, columns = (np.hanning(size + 2)[1:-1] for size in luma.shape)
    window = rows[:, None] * columns
    power = np.abs(np.fft.fft2((luma - luma.mean()) * window)) ** 2
    fine = np.maximum(*np.meshgrid(*map(_frequencies, luma.shape), indexing="ij")) > 0.25
    return float(power[fine].sum() / (luma.size * (window**2).sum()))


def _frequencies(size: int) -> np.ndarray:
    return np.abs(np.fft.fftfreq(size))
