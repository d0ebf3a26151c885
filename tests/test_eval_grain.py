import numpy as np
import pytest
from agentsd_eval.quality.grain import grain
from PIL import Image, ImageFilter


def picture(values):
    return Image.fromarray(np.repeat(values.round().clip(0, 255).astype(np.uint8)[..., None], 3, axis=2))


def wave(cycles_a_pixel, size=64, height=40):
    x = np.arange(size)
    return picture(128 + height * np.cos(2 * np.pi * cycles_a_pixel * x)[None, :] * np.ones((size, 1)))


def test_a_fine_wave_has_its_power_and_a_coarse_one_none():
    assert grain(wave(0.375)) == pytest.approx(40**2 / 2, rel=0.02)
    assert grain(wave(0.125)) < 1


def test_white_noise_has_three_quarters_of_its_variance():
    noise = np.random.default_rng(0).normal(0, 20, (96, 96))
    assert grain(picture(128 + noise)) == pytest.approx(0.75 * 400, rel=0.05)


def test_blur_takes_grain_away_and_a_flat_picture_has_none():
    noisy = picture(128 + np.random.default_rng(1).normal(0, 20, (64, 64)))
    assert grain(noisy.filter(ImageFilter.GaussianBlur(1))) < 0.2 * grain(noisy)
    assert grain(picture(np.full((64, 64), 77.0))) == 0
