"""Peers that skip whole calls: their rules against loops by hand."""

import numpy as np
import pytest
import torch
from agentsd_eval.images.skipped_calls import EasyCache, Spectrum, skipped_calls
from callers import Caller
from numpy.polynomial.chebyshev import chebvander
from tiny import make_small_unet

STATES = torch.randn(6, 2, 3, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("steps", "computed"),
    [(25, [0, 1, 2, 3, 4, 6, 8, 11, 15, 20]), (50, [0, 1, 2, 3, 4, 6, 8, 11, 15, 20, 25, 31, 38, 46])],
)
def test_spectrum_computes_a_growing_share_of_the_calls(steps, computed):
    """By hand from a window of 2 that grows by 0.75: 2, 2.75, 3.5, 4.25, 5, 5.75, 6.5, 7.25, 8."""
    unet, ran = make_small_unet(), []
    unet.conv_in.register_forward_pre_hook(lambda m, args: ran.append(now))
    caller = Caller(steps)
    with skipped_calls(unet, 2, 0, Spectrum):
        for now in range(steps):
            caller(unet, now)
    assert ran == computed
    caller(unet, 0)
    assert ran == [*computed, steps - 1]  # the model's own again


def test_spectrum_forecasts_by_a_ridge_regression_and_a_line():
    """Against numpy: least squares with a row for each coefficient's penalty."""
    steps = [0, 1, 2, 3, 4, 6]
    rule = Spectrum(None, 2)
    rule._known = list(zip(steps, STATES, strict=True))
    design = chebvander(np.array(steps) / 25 - 1, 4)
    rows = np.concatenate([design, np.sqrt(0.1) * np.eye(5)])
    targets = np.concatenate([STATES.reshape(6, -1).numpy(), np.zeros((5, 96))])
    fit = np.linalg.lstsq(rows, targets, rcond=None)[0]
    for step in (7, 8, 30):
        ridge = chebvander(np.array([step / 25 - 1]), 4) @ fit
        line = (STATES[5] + (step - 6) / 2 * (STATES[5] - STATES[4])).reshape(1, -1).numpy()
        expected = (ridge + line).reshape(2, 3, 4, 4) / 2
        np.testing.assert_allclose(rule.forecast(step).numpy(), expected, atol=1e-9)


def test_a_forecast_goes_through_the_models_last_layers():
    unet, caller = make_small_unet(), Caller(12)
    states = []
    unet.conv_norm_out.register_forward_pre_hook(lambda m, args: states.append(args[0]))
    with skipped_calls(unet, 2, 0, Spectrum):
        for i in range(5):
            caller(unet, i)
        rule = Spectrum(unet, 2)
        rule._known = list(enumerate(states))
        expected = unet.conv_out(unet.conv_act(unet.conv_norm_out(rule.forecast(5))))
        torch.testing.assert_close(caller(unet, 5), expected)
        ran = []
        unet.conv_in.register_forward_pre_hook(lambda m, args: ran.append(now))
        for now in range(5):  # another run begins, and warms up
            caller(unet, now)
    assert ran == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("threshold", [1, 20, 60, 300])
def test_easycache_skips_while_the_guessed_changes_add_up_to_less(threshold):
    """Against a loop in Python over a model that is a formula."""
    rng = np.random.default_rng(0)
    inputs = [np.cumsum(0.1 * rng.standard_normal((2, 4, 16, 16)), 0) + 0.05 * i for i in range(20)]
    timesteps = [999 - 50 * i for i in range(20)]

    def model(x, t):
        return np.tanh(x) * (1 + t / 1000)

    rule, ran = EasyCache(None, threshold), []
    known, rate, total, first = None, None, 0.0, True
    for x, t in zip(inputs, timesteps, strict=True):

        def predict(x=x, t=t):
            ran.append(t)
            return torch.from_numpy(model(x, t))

        got = rule(torch.from_numpy(x), float(t), predict).numpy()
        change = None
        if t <= 0.85 * 999 and t > 0.05 * 999:
            if not first:
                change = np.abs(x - known[0])[..., ::8, ::8].mean()
            first = False
        skip = False
        if change is not None and rate is not None:
            total += rate * change / np.abs(known[1]).mean()
            skip = total < threshold / 100
            total *= skip
        if skip:
            expected = x + known[1] - known[0]
        else:
            expected = model(x, t)
            if change is not None:
                rate = np.abs(expected - known[1])[..., ::8, ::8].mean() / change
            known = (x, expected) if t > 0.05 * 999 else known
        assert (ran[-1:] == [t]) == (not skip)
        np.testing.assert_allclose(got, expected, atol=1e-12)
    assert (len(ran) == 20) == (threshold == 1)
