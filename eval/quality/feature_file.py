"""Feature vectors kept beside a table: distances can be computed again without the pictures."""

import io
import zipfile
from pathlib import Path

import numpy as np

from ..errors import EvalError
from ..pages.output import write_bytes

SUFFIX = ".npz"


def save_features(path: Path, network: str, features: np.ndarray) -> None:
    """Write features (N, D) of a named network, in half precision, in the order of the pictures."""
    content = io.BytesIO()
    np.savez_compressed(content, network=np.array(network), features=features.astype(np.float16))
    write_bytes(path, content.getvalue())


def load_features(path: Path, network: str) -> np.ndarray:
    """Return features (N, D), float32. Raises EvalError on another file, or one of another network."""
    try:
        with np.load(path) as kept:
            found, features = str(kept["network"]), kept["features"].astype(np.float32)
    except OSError as error:
        raise EvalError(f"can't read {path}: {error.strerror or error}") from None
    except (KeyError, ValueError, zipfile.BadZipFile):
        raise EvalError(f"{path} holds no features of a table; give a folder of pictures") from None
    if found != network:
        raise EvalError(f"{path} holds features of {found}, not of {network}; choose --features {found}")
    return features
