"""Distances between sets of feature vectors, in float64, and how sure they are."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..intervals import drawn, sums

Array = np.ndarray
BLOCK = 1024
"""Feature vectors that are worked on at once: 50,000 references need no 50,000 x 50,000 matrix."""
RESAMPLES = 200
"""Bootstrap draws for the standard error of a FD."""


@dataclass(frozen=True)
class Gaussian:
    """Mean (D,) and unbiased covariance (D, D) of a set of feature vectors."""

    mean: Array
    covariance: Array


def fit(features: Array) -> Gaussian:
    """Return the Gaussian of features (N, D), N at least 2."""
    mean: Array = features.mean(axis=0, dtype=np.float64)
    return Gaussian(mean, np.cov(features, rowvar=False, dtype=np.float64))


def _blocks(count: int) -> Iterator[slice]:
    return (slice(start, min(start + BLOCK, count)) for start in range(0, count, BLOCK))


def _root_sum(symmetric: Array) -> float:
    """Return the sum of the roots of the eigenvalues of a positive semidefinite matrix."""
    return float(np.sqrt(np.clip(np.linalg.eigvalsh(symmetric), 0, None)).sum())


class FrechetSample:
    """Features (N, D) beside a reference, ready for FDs of many resamples (Heusel et al. 2017, Eq. 6).

    The distance is that of torchmetrics' FrechetInceptionDistance (Heusel et al. 2017, Eq. 6), which has no
    paired errors and takes half a minute for 2,048 features. Resampling images only picks rows and columns of
    the N x N matrix X S_ref X^T: a resample costs the eigenvalues of an N x N matrix, whatever D is.
    """

    def __init__(self, features: Array, reference: Gaussian, captions: Sequence[str] | None = None) -> None:
        self._features = np.asarray(features, dtype=np.float64)
        self._reference, self.captions = reference, captions
        self._gram = self._features @ reference.covariance @ self._features.T

    def distance(self, picked: Array) -> float:
        """Return the FD of the images of indices `picked` (M,), repeats allowed."""
        count = len(picked)
        sample = self._features[picked]
        mean = sample.mean(axis=0)
        gram = self._gram[np.ix_(picked, picked)]
        gram = gram - gram.mean(axis=0) - gram.mean(axis=1)[:, None] + gram.mean()
        spread = ((sample - mean) ** 2).sum() / (count - 1) + np.trace(self._reference.covariance)
        shift = ((mean - self._reference.mean) ** 2).sum()
        return float(shift + spread) - 2 * _root_sum(gram / (count - 1))

    @cached_property
    def resampled(self) -> Array:
        """The distances of bootstrap draws, which are the same for every sample of these captions."""
        count = len(self._features)
        # Each costs an eigendecomposition as large as the images are many.
        draws = RESAMPLES if count <= 1000 else RESAMPLES // 4
        captions = range(count) if self.captions is None else self.captions
        return np.array([self.distance(np.repeat(np.arange(count), n)) for n in drawn(captions, draws)])


def frechet_difference_error(a: FrechetSample, b: FrechetSample) -> float:
    """Return the standard error of distance(a) - distance(b) for paired images.

    Paired bootstrap: each resample draws the same captions for both; the reference is held fixed.
    """
    return float(np.std(a.resampled - b.resampled, ddof=1))


@dataclass(frozen=True)
class KernelDistance:
    """An unbiased squared maximum mean discrepancy, and its value without each image in turn."""

    value: float
    without_generated: Array
    without_real: Array
    captions: Sequence[str] | None = None
    """Of the generated images, where they may share some."""

    @property
    def error(self) -> float:
        """The jackknife's standard error, over generated and real images."""
        return self._error(self.without_generated, self.without_real)

    def difference_error(self, other: "KernelDistance") -> float:
        """The standard error of the difference to another set of the same seeds and real images."""
        return self._error(
            self.without_generated - other.without_generated, self.without_real - other.without_real
        )

    def _error(self, generated: Array, real: Array) -> float:
        parts = sums(generated - generated.mean(), self.captions), real - real.mean()
        return float(np.sqrt(sum((len(part) - 1) / len(part) * (part**2).sum() for part in parts)))


class KernelSet:
    """Features (N, D), and the sums of each one's kernel with all the others."""

    def __init__(self, features: Array) -> None:
        own = (np.square(features, dtype=np.float64).sum(axis=1) / features.shape[1] + 1) ** 3
        self.features, self.rows = features, _sums(features, features)[0] - own

    def split_distance(self, picked: Array) -> float:
        """Return the KID of the features of indices `picked` (n,), no repeats, to all the others."""
        n, m = len(picked), len(self.features) - len(picked)
        within = KernelSet(np.asarray(self.features)[picked]).rows.sum()
        across = self.rows[picked].sum() - within
        rest = self.rows.sum() - within - 2 * across
        return float(within / (n * (n - 1)) + rest / (m * (m - 1)) - 2 * across / (n * m))


def kernel_distance(
    generated: Array | KernelSet, real: Array | KernelSet, captions: Sequence[str] | None = None
) -> KernelDistance:
    """Return the KID of features (N, D) and (M, D), N and M at least 3.

    The kernel is (x.y / D + 1)^3 (Binkowski et al. 2018, KID), over all pairs rather than subsets. A set
    that is compared with many is made a KernelSet once.
    """
    x, y = (s if isinstance(s, KernelSet) else KernelSet(s) for s in (generated, real))
    n, m = len(x.features), len(y.features)
    across, down = _sums(x.features, y.features)
    x_rows, y_rows = x.rows, y.rows
    a, c, b = x_rows.sum(), y_rows.sum(), across.sum()

    def value(a: Array, b: Array, c: Array, n: int, m: int) -> Array:
        return a / (n * (n - 1)) + c / (m * (m - 1)) - 2 * b / (n * m)

    return KernelDistance(
        value=float(value(a, b, c, n, m)),
        without_generated=value(a - 2 * x_rows, b - across, c, n - 1, m),
        without_real=value(a, b - down, c - 2 * y_rows, n, m - 1),
        captions=captions,
    )


def _sums(x: Array, y: Array) -> tuple[Array, Array]:
    """Return the sums of each of x's kernels with all of y (N,), and of each of y's with all of x (M,)."""
    across, down = np.zeros(len(x)), np.zeros(len(y))
    for a in _blocks(len(x)):
        for b in _blocks(len(y)):
            part = _kernel(x[a], y[b])
            across[a] += part.sum(axis=1)
            down[b] += part.sum(axis=0)
    return across, down


def _kernel(x: Array, y: Array) -> Array:
    base = np.asarray(x, np.float64) @ np.asarray(y, np.float64).T
    base /= x.shape[1]
    base += 1
    cube = base * base
    cube *= base
    return cube


def unit(features: Array) -> Array:
    """Return rows of length 1."""
    features = np.asarray(features, dtype=np.float64)
    return features / np.linalg.norm(features, axis=1, keepdims=True)
