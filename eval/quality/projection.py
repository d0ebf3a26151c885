"""A fixed basis of few components, in which a FD has full rank with few images."""

import hashlib
from functools import cache
from pathlib import Path

import numpy as np

_BASIS = Path(__file__).with_name("basis.npy")
SHA256 = "c343aebe9d5e7fb5d07935b1996bdfe5b0c70360fa5b6591bcbf58ec03f75a6b"
"""Of the file, so that a figure is known to be of this basis."""


@cache
def load_basis() -> np.ndarray:
    """Return the shipped basis (48, 1280): the directions of greatest variance of features of length 1.

    They are those of 4,096 scenes of all 857 concepts, each centred on their mean.

    Raises:
        ValueError: the file is not the one that this version was released with.
    """
    found = hashlib.sha256(_BASIS.read_bytes()).hexdigest()
    if found != SHA256:
        raise ValueError(
            f"{_BASIS} has SHA-256 {found[:12]}..., not {SHA256[:12]}...: install agentsd-eval again"
        )
    return np.load(_BASIS).astype(np.float64)


def project(features: np.ndarray, basis: np.ndarray) -> np.ndarray:
    """Return features (N, D) in a basis (K, D), as (N, K)."""
    return np.asarray(features, np.float64) @ basis.T


def frechet_features(features: np.ndarray, network: str) -> np.ndarray:
    """Return what a FD is of: Inception's features as they are (FID), others in the basis."""
    return features if network == "inception" else project(features, load_basis())
