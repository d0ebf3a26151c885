"""Distances between sets of feature vectors, in float64, and how sure they are."""

from dataclasses import dataclass

import numpy as np

Array = np.ndarray
Z95 = 1.959964
"""Half the width of a 95% interval, in standard errors."""


@dataclass(frozen=True)
class Gaussian:
    """Mean (D,) and unbiased covariance (D, D) of a set of feature vectors."""

    mean: Array
    covariance: Array


def fit(features: Array) -> Gaussian:
    """Return the Gaussian of features (N, D), N at least 2."""
    features = np.asarray(features, dtype=np.float64)
    return Gaussian(features.mean(axis=0), np.atleast_2d(np.cov(features, rowvar=False)))


def frechet_distance(a: Gaussian, b: Gaussian) -> float:
    """Return |m_a - m_b|^2 + tr(S_a + S_b - 2 (S_a S_b)^(1/2)) (Heusel et al. 2017, Eq. 6).

    The trace of the root is the sum of the roots of the eigenvalues of S_a^(1/2) S_b S_a^(1/2), which
    is symmetric: no matrix root of a product, so no complex parts.
    """
    values, vectors = np.linalg.eigh(a.covariance)
    root = vectors * np.sqrt(np.clip(values, 0, None))
    cross = _root_sum(root.T @ b.covariance @ root)
    mean = float(((a.mean - b.mean) ** 2).sum())
    return mean + float(np.trace(a.covariance) + np.trace(b.covariance)) - 2 * cross


def _root_sum(symmetric: Array) -> float:
    """Return the sum of the roots of the eigenvalues of a positive semidefinite matrix."""
    return float(np.sqrt(np.clip(np.linalg.eigvalsh(symmetric), 0, None)).sum())


class FrechetSample:
    """Features (N, D) beside a reference, ready for distances of many resamples.

    Resampling pictures only picks rows and columns of the N x N matrix X S_ref X^T, so that a resample
    costs the eigenvalues of an N x N matrix, whatever D is.
    """

    def __init__(self, features: Array, reference: Gaussian) -> None:
        self._features = np.asarray(features, dtype=np.float64)
        self._reference = reference
        self._gram = self._features @ reference.covariance @ self._features.T

    def distance(self, picked: Array) -> float:
        """Return the FD of the pictures of indices `picked` (M,), repeats allowed."""
        count = len(picked)
        sample = self._features[picked]
        mean = sample.mean(axis=0)
        gram = self._gram[np.ix_(picked, picked)]
        gram = gram - gram.mean(axis=0) - gram.mean(axis=1)[:, None] + gram.mean()
        spread = ((sample - mean) ** 2).sum() / (count - 1) + np.trace(self._reference.covariance)
        shift = ((mean - self._reference.mean) ** 2).sum()
        return float(shift + spread) - 2 * _root_sum(gram / (count - 1))


def frechet_difference_error(a: FrechetSample, b: FrechetSample, count: int, resamples: int) -> float:
    """Return the standard error of distance(a) - distance(b) for paired pictures.

    Paired bootstrap: each resample draws the same `count` of `count` seeds for both; the reference is
    held fixed.
    """
    random = np.random.default_rng(0)
    draws = [random.integers(count, size=count) for _ in range(resamples)]
    return float(np.std([a.distance(draw) - b.distance(draw) for draw in draws], ddof=1))


@dataclass(frozen=True)
class KernelDistance:
    """An unbiased squared maximum mean discrepancy, and its value without each picture in turn."""

    value: float
    without_generated: Array
    without_real: Array

    @property
    def error(self) -> float:
        """The jackknife's standard error, over generated and real pictures."""
        return _jackknife_error(self.without_generated, self.without_real)

    def difference_error(self, other: "KernelDistance") -> float:
        """The standard error of the difference to another set of the same seeds and real pictures."""
        return _jackknife_error(
            self.without_generated - other.without_generated, self.without_real - other.without_real
        )


class KernelSet:
    """Features (N, D), and the sums of each one's kernel with all the others."""

    def __init__(self, features: Array) -> None:
        self.features = np.asarray(features, dtype=np.float64)
        within = _kernel(self.features, self.features)
        self.rows = within.sum(axis=1) - np.diag(within)


def kernel_distance(generated: Array | KernelSet, real: Array | KernelSet) -> KernelDistance:
    """Return the KID of features (N, D) and (M, D), N and M at least 3.

    The kernel is (x.y / D + 1)^3 (Binkowski et al. 2018, KID), over all pairs rather than subsets. A set
    that is compared with many is made a KernelSet once.
    """
    x, y = (s if isinstance(s, KernelSet) else KernelSet(s) for s in (generated, real))
    n, m = len(x.features), len(y.features)
    xy = _kernel(x.features, y.features)
    x_rows, y_rows = x.rows, y.rows
    a, c, b = x_rows.sum(), y_rows.sum(), xy.sum()

    def value(a: Array, b: Array, c: Array, n: int, m: int) -> Array:
        return a / (n * (n - 1)) + c / (m * (m - 1)) - 2 * b / (n * m)

    return KernelDistance(
        value=float(value(a, b, c, n, m)),
        without_generated=value(a - 2 * x_rows, b - xy.sum(axis=1), c, n - 1, m),
        without_real=value(a, b - xy.sum(axis=0), c - 2 * y_rows, n, m - 1),
    )


def _kernel(x: Array, y: Array) -> Array:
    return (x @ y.T / x.shape[1] + 1) ** 3


def _jackknife_error(*samples: Array) -> float:
    return float(np.sqrt(sum((len(s) - 1) / len(s) * ((s - s.mean()) ** 2).sum() for s in samples)))


def standard_error(values: Array) -> float:
    """Return the standard error of the mean of independent values (N,)."""
    return float(np.std(values, ddof=1) / np.sqrt(len(values)))


def pictures_needed(value: float, error: float, count: int, share: float = 0.02) -> int:
    """Return how many pictures would show a difference of `share` of `value` at 95%.

    `error` is the standard error of a difference at `count` pictures; it shrinks as their root.
    """
    return int(np.ceil(count * (Z95 * error / (share * abs(value))) ** 2))


def nearest(features: Array, references: Array) -> Array:
    """Return for each of features (N, D) the index of the reference (M, D) of greatest cosine, (N,)."""
    return np.argmax(unit(features) @ unit(references).T, axis=1)


def unit(features: Array) -> Array:
    """Return rows of length 1."""
    features = np.asarray(features, dtype=np.float64)
    return features / np.linalg.norm(features, axis=1, keepdims=True)


def cosine_distance(a: Array, b: Array) -> Array:
    """Return 1 - cosine of each row of a and b, (N,)."""
    return 1 - (unit(a) * unit(b)).sum(axis=1)


def diversity(features: Array) -> float:
    """Return the mean squared distance of two pictures' features (N, D), each brought to length 1."""
    return float(2 * unit(features).var(axis=0, ddof=1).sum())
