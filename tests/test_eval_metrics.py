"""Distances against analytic Gaussians, pytorch-fid's own function, torchmetrics, and loops over pairs."""

import itertools
import tracemalloc

import numpy as np
import pytest
import torch
from agentsd_eval.pages.rows import distance_name
from agentsd_eval.quality import metrics
from agentsd_eval.quality.features import frechet_features
from agentsd_eval.studies.fid import frechet_distance
from torchmetrics.image.kid import KernelInceptionDistance


def two_sets():
    i, j = np.arange(40)[:, None], np.arange(6)
    first = np.sin(1.7 * i * (j + 1) + j) + 0.1 * j
    i = np.arange(30)[:, None]
    second = np.cos(2.3 * i * (j + 2)) * (1 + 0.2 * j) - 0.3
    return first, second


def normal(mean, roots, turn):
    """Four points whose mean, and whose unbiased covariance before a turn, are exactly these."""
    corners = np.array([[1, 1], [1, -1], [-1, 1], [-1, -1]]) * np.sqrt(3 / 4)
    return (corners * roots + mean) @ turn.T


def distances(features, real):
    """That which a table shows beside its paired errors, and torchmetrics', which `fid` prints."""
    sample = metrics.FrechetSample(features, metrics.fit(real))
    return [sample.distance(np.arange(len(features))), frechet_distance(features, real)]


@pytest.mark.parametrize("turn", [np.eye(2), np.linalg.qr(np.random.default_rng(0).normal(size=(2, 2)))[0]])
def test_frechet_distance_of_gaussians_is_analytic(turn):
    """Of diagonal covariances |m|^2 + sum (s1 - s2)^2; turned, it is the same."""
    found = distances(normal([0, 1], [2, 3], turn), normal([3, 1], [1, 5], turn))
    assert found == pytest.approx([9 + 1 + 4] * 2, rel=1e-6)  # roots of eigenvalues that should be 0


def test_frechet_distance_equals_pytorch_fids():
    """pytorch_fid.fid_score.calculate_frechet_distance (pytorch-fid 0.3.0, SciPy 1.17.1) of the two sets'
    means and np.cov(..., rowvar=False)."""
    assert distances(*two_sets()) == pytest.approx([3.207428378983746] * 2, rel=1e-6)


@pytest.mark.parametrize("count", [4, 40])  # fewer images than features, and more
def test_a_resample_has_the_distance_of_its_images(count):
    first, second = two_sets()
    picked = np.random.default_rng(1).integers(40, size=count)
    quick = metrics.FrechetSample(first, metrics.fit(second)).distance(picked)
    slow = frechet_distance(first[picked], second)
    assert quick == pytest.approx(slow, rel=1e-6)  # roots of eigenvalues that should be 0


def test_equal_sets_have_distance_zero():
    first, _ = two_sets()
    assert distances(first, first) == pytest.approx([0, 0], abs=1e-6)


def kernel_loop(x, y):
    def k(a, b):
        return (float(a @ b) / len(a) + 1) ** 3

    within = [np.mean([k(a, b) for a, b in itertools.permutations(s, 2)]) for s in (x, y)]
    return float(sum(within) - 2 * np.mean([k(a, b) for a in x for b in y]))


def test_kernel_distance_equals_a_loop_over_pairs():
    first, second = two_sets()
    distance = metrics.kernel_distance(first, second)
    assert distance.value == pytest.approx(kernel_loop(first, second), rel=1e-10)
    fewer, fewer_real = np.delete(first, 3, 0), np.delete(second, 5, 0)
    assert distance.without_generated[3] == pytest.approx(kernel_loop(fewer, second), rel=1e-9)
    assert distance.without_real[5] == pytest.approx(kernel_loop(first, fewer_real), rel=1e-9)


class GivenFeatures(torch.nn.Module):
    """What torchmetrics takes for a network: the features are the pixels."""

    num_features = 6

    def forward(self, pixels):
        return pixels.flatten(1)


def as_pixels(features):
    return torch.from_numpy(features)[:, :, None, None]


@pytest.mark.filterwarnings("ignore:Metric .Kernel Inception Distance. will save")
def test_kernel_distance_equals_torchmetrics():
    first, second = two_sets()
    kid = KernelInceptionDistance(feature=GivenFeatures(), subsets=1, subset_size=30, normalize=True)
    kid.set_dtype(torch.float64)
    kid.update(as_pixels(second), real=True)
    kid.update(as_pixels(first[:30]), real=False)
    kernel = metrics.kernel_distance(first[:30], second).value
    assert kernel == pytest.approx(float(kid.compute()[0]), rel=1e-6)


def test_a_split_of_the_references_has_its_own_distances():
    references, picked = two_sets()[1], np.array([3, 28, 11, 0, 7])
    expected = kernel_loop(references[picked], np.delete(references, picked, 0))
    assert metrics.KernelSet(references).split_distance(picked) == pytest.approx(expected, rel=1e-9)


def test_references_need_no_matrix_of_all_their_pairs():
    references = np.random.default_rng(0).normal(size=(5000, 4)).astype(np.float32)
    tracemalloc.start()
    metrics.kernel_distance(references[:50], metrics.KernelSet(references))
    metrics.fit(references)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 0.3 * 8 * 5000**2


def test_the_baselines_resamples_are_computed_once(monkeypatch):
    monkeypatch.setattr(metrics, "RESAMPLES", 5)
    first, second = two_sets()
    reference = metrics.fit(second)
    baseline, row, other = (metrics.FrechetSample(first + shift, reference) for shift in (0, 0.1, 0.2))
    counted, distance = [], metrics.FrechetSample.distance
    monkeypatch.setattr(
        metrics.FrechetSample, "distance", lambda self, picked: counted.append(self) or distance(self, picked)
    )
    for sample in (row, other):
        metrics.frechet_difference_error(sample, baseline)
    assert [counted.count(sample) for sample in (baseline, row, other)] == [5, 5, 5]


def test_kernel_distance_is_unbiased_and_its_error_is_its_spread():
    random = np.random.default_rng(0)
    pairs = (random.normal(size=(2, 25, 5)) for _ in range(300))  # of one distribution: 0
    distances = [metrics.kernel_distance(*pair) for pair in pairs]
    values = np.array([distance.value for distance in distances])
    assert abs(values.mean()) < 4 * values.std() / np.sqrt(300)
    assert np.mean([distance.error for distance in distances]) == pytest.approx(values.std(), rel=0.35)


def test_paired_errors_vanish_for_equal_images_and_only_then():
    first, second = two_sets()
    moved = first + np.random.default_rng(0).normal(scale=0.1, size=first.shape)
    reference = metrics.fit(second)
    same, other = (metrics.FrechetSample(s, reference) for s in (first, moved))
    assert metrics.frechet_difference_error(same, same) == 0
    assert metrics.frechet_difference_error(same, other) > 0
    kernel, moved_kernel = (metrics.kernel_distance(s, second) for s in (first, moved))
    assert kernel.difference_error(kernel) == 0
    assert 0 < kernel.difference_error(moved_kernel) < kernel.error


def test_paired_bootstrap_error_matches_the_spread_over_fresh_seeds():
    random = np.random.default_rng(0)
    reference = metrics.Gaussian(np.zeros(3), np.eye(3))

    def draw():
        first = random.normal(loc=0.5, size=(200, 3))
        second = first * 1.2 + random.normal(scale=0.3, size=(200, 3))
        return metrics.FrechetSample(first, reference), metrics.FrechetSample(second, reference)

    everyone = np.arange(200)
    pairs = [draw() for _ in range(200)]
    spread = np.std([a.distance(everyone) - b.distance(everyone) for a, b in pairs])
    errors = [metrics.frechet_difference_error(a, b) for a, b in pairs[:4]]
    assert np.mean(errors) == pytest.approx(spread, rel=0.25)


@pytest.mark.parametrize(
    ("network", "scenes", "size", "name"),
    [
        ("efficientnet-lite0", True, 48, "FD (efficientnet-lite0, 48 components)"),
        ("efficientnet-lite0", False, 1280, "FD (efficientnet-lite0)"),
        ("inception", False, 1280, "FID"),
    ],
)
def test_the_basis_made_for_scenes_is_for_scenes_alone(network, scenes, size, name):
    assert frechet_features(np.ones((3, 1280)), network, scenes).shape == (3, size)
    assert distance_name(network, scenes) == name
