"""A run's folder: images that are whole or not there, and manifests that say how each was made."""

import hashlib
import os
import statistics
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from pydantic import (
    BaseModel,
    ConfigDict,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
)

from .. import run_file
from ..errors import EvalError
from ..files import explain_os_error, png_bytes, write_bytes
from .methods import Method
from .prompts import ImageSpec
from .sampling import Seconds


class Entry(BaseModel):
    """A line of a manifest: an image, its file's SHA-256, and its batch's time."""

    model_config = ConfigDict(frozen=True, strict=True)
    index: NonNegativeInt
    seed: NonNegativeInt
    prompt: str
    sha256: str
    batch: NonNegativeInt
    batch_images: PositiveInt
    seconds: PositiveFloat
    cpu_seconds: PositiveFloat
    session: str
    """Names the process that made it; times are compared within one only."""
    maker: str
    """The number in run.json of the environment (commit, versions, machine) that made it."""


Timings = dict[tuple[int, str], Entry]
"""An entry for each (batch, session) in which a batch was made."""


def times_of(ours: Timings, baseline: Timings, device: torch.device) -> dict[str, Any]:
    """Return median seconds an image, and the speed-up against the baseline where both ran in one session."""

    def charged(entry: Entry) -> float:
        return Seconds(entry.seconds, entry.cpu_seconds).charged(device)

    both = [charged(baseline[key]) / charged(ours[key]) for key in ours if key in baseline]
    return {
        "seconds": statistics.median(e.seconds / e.batch_images for e in ours.values()),
        "cpu_seconds": statistics.median(e.cpu_seconds / e.batch_images for e in ours.values()),
        "speedup": statistics.median(both) if both else None,
        "speedup_batches": len(both),
    }


class Store:
    """The images of one run, in `folder/images/<method>/00000.png`."""

    def __init__(self, folder: Path, rank: int = 0) -> None:
        self.folder = folder
        self._rank = rank
        self._maker = ""

    def claim(self, fingerprint: dict[str, Any], environment: dict[str, Any]) -> None:
        """Mark the folder as a run's, and who makes its images; EvalError names how another run differs."""
        run = run_file.read(self.folder)
        found = run.get("images") or fingerprint
        if different := [key for key in found | fingerprint if found.get(key) != fingerprint.get(key)]:
            changes = "; ".join(
                f"{key}: {found.get(key)!r} there, {fingerprint.get(key)!r} now" for key in different
            )
            raise EvalError(f"{self.folder} holds another run's images ({changes}); choose another --out")
        known: dict[str, Any] = run.get("environments", {})
        self._maker = next((name for name, one in known.items() if one == environment), str(len(known) + 1))
        if self._maker not in known:
            run_file.update(self.folder, images=fingerprint, environments={self._maker: environment})

    def path(self, method: Method, index: int) -> Path:
        """Return where an image is, or will be."""
        return self.folder / "images" / method.key / f"{index:05d}.png"

    def intact(self, method: Method) -> dict[int, Entry]:
        """Return the entries of all images that are on disk as they were written, by index."""
        entries = {}
        digests: dict[int, str | None] = {}
        for entry in self._entries(method):
            if entry.index not in digests:
                digests[entry.index] = _digest(self.path(method, entry.index))
            if digests[entry.index] == entry.sha256:
                entries[entry.index] = entry
        return entries

    def timings(self, method: Method) -> Timings:
        """Return when a method's batches were made."""
        return {(entry.batch, entry.session): entry for entry in self._entries(method)}

    def makers(self, method: Method) -> dict[str, str]:
        """Return the row's figure `makers`: the environments that a method's images were made in."""
        return {"makers": "+".join(sorted({entry.maker for entry in self._entries(method)}))}

    def _entries(self, method: Method) -> Iterator[Entry]:
        for manifest in sorted(self.path(method, 0).parent.glob("manifest-*.jsonl")):
            for line in manifest.read_bytes().splitlines():
                with suppress(ValidationError):  # a line cut off when the run was killed: made again
                    yield Entry.model_validate_json(line)

    def save(
        self,
        method: Method,
        batch: int,
        specs: Sequence[ImageSpec],
        images: Sequence[Image.Image],
        seconds: Seconds,
        session: str,
    ) -> None:
        """Write a batch's images, then its lines. Raises EvalError if the disk is full."""
        entries = []
        for spec, image in zip(specs, images, strict=True):
            content = png_bytes(image)
            write_bytes(self.path(method, spec.index), content)
            entry = Entry(
                index=spec.index,
                seed=spec.seed,
                prompt=spec.prompt,
                sha256=hashlib.sha256(content).hexdigest(),
                maker=self._maker,
                **_timing(batch, len(specs), seconds, session),
            )
            entries.append(entry)
        self._append(method, entries)

    def save_time(
        self, method: Method, batch: int, entries: Sequence[Entry], seconds: Seconds, session: str
    ) -> None:
        """Write another time for a batch whose images, of these entries, are kept as they are."""
        change = _timing(batch, len(entries), seconds, session)
        self._append(method, [entry.model_copy(update=change) for entry in entries])

    def _append(self, method: Method, entries: Sequence[Entry]) -> None:
        manifest = self.path(method, 0).with_name(f"manifest-{self._rank}.jsonl")
        # The line break first: a killed run may have left half a line.
        lines = "".join(f"\n{entry.model_dump_json()}" for entry in entries)
        try:
            with manifest.open("ab") as file:
                file.write(lines.encode())
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise explain_os_error(error, manifest) from error

    def image(self, method: Method, index: int) -> Image.Image:
        """Return an image, RGB."""
        return Image.open(self.path(method, index)).convert("RGB")


def _timing(batch: int, images: int, seconds: Seconds, session: str) -> dict[str, Any]:
    taken = {"seconds": seconds.wall, "cpu_seconds": seconds.cpu}
    return {"batch": batch, "batch_images": images, "session": session, **taken}


def _digest(path: Path) -> str | None:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None
