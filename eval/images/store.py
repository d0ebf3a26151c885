"""A run's folder: images that are whole or not there, and manifests that say how each was made."""

import hashlib
import os
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
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
from ..environment import describe_run
from ..errors import EvalError
from ..files import explain_os_error, png_bytes, write_bytes
from ..settings import CommandSettings
from .methods import Method
from .prompts import ImageSpec
from .sampling import Seconds

LISTING, DIGITS = "prompts_and_seeds", 4
"""What a run's images are asked by: so many digits of a hash for each, in their order."""


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
    timed_by: str
    """That of the environment whose time this is: a batch is timed again beside rows that come later."""


MAKERS = "makers", "timed_by", "costed_by"
"""Figures of a row that say which environments of run.json made its images, its seconds, and its costs."""
Timings = dict[tuple[int, str], Entry]
"""An entry for each (batch, session) in which a batch was made."""


def times_of(rows: Sequence[Timings], device: torch.device) -> list[dict[str, Any]]:
    """Return for each row median seconds an image, and the speed-up against the first one, the baseline's.

    A row's are of batches of one size that one maker made (`timed_batch`, `timed_by`): the most images that
    every row has of such, else the most of its own. A speed-up is of batches that both made in one session.
    """
    counts = [Counter[tuple[str, int]]() for _ in rows]
    for count, taken in zip(counts, rows, strict=True):
        for entry in taken.values():
            count[entry.timed_by, entry.batch_images] += entry.batch_images
    shared = set.intersection(*map(set, counts))
    total = sum(counts, Counter[tuple[str, int]]())

    def charged(entry: Entry) -> float:
        return Seconds(entry.seconds, entry.cpu_seconds).charged(device)

    found = []
    for count, taken in zip(counts, rows, strict=True):
        maker, size = max(shared, key=lambda of: (total[of], of)) if shared else count.most_common(1)[0][0]
        ours = {key: e for key, e in taken.items() if (e.timed_by, e.batch_images) == (maker, size)}
        both = [charged(rows[0][key]) / charged(ours[key]) for key in ours if key in rows[0]]
        found.append(
            {
                "seconds": statistics.median(entry.seconds / size for entry in ours.values()),
                "cpu_seconds": statistics.median(entry.cpu_seconds / size for entry in ours.values()),
                "speedup": statistics.median(both) if both else None,
                "speedup_batches": len(both),
                "timed_by": maker,
                "timed_batch": size,
            }
        )
    return found


class Store:
    """The images of one run, in `folder/images/<method>/00000.png`."""

    def __init__(self, folder: Path, rank: int = 0) -> None:
        self.folder = folder
        self._rank = rank
        self.maker = ""

    def claim(self, fingerprint: dict[str, Any], environment: dict[str, Any]) -> None:
        """Mark the folder as a run's, and who makes its images; EvalError names how another run differs.

        A run may go on with more images, or fewer, where prompts and seeds are the same as far as both go.
        """
        run = run_file.read(self.folder)
        found: dict[str, Any] = run.get("images") or fingerprint
        pairs: dict[str, tuple[Any, ...]] = {
            key: (found.get(key), fingerprint.get(key)) for key in found | fingerprint
        }
        listings = pairs.get(LISTING, ("", ""))
        longest = max(map(str, listings), key=len)
        if all(longest.startswith(str(listing)) for listing in listings):
            pairs.pop(LISTING, None)
        else:
            there, now = (len(str(one)) // DIGITS for one in listings)
            pairs[LISTING] = f"of {there} images", f"of {now}, not the same ones"
        if changes := "; ".join(f"{k}: {a!r} there, {b!r} now" for k, (a, b) in pairs.items() if a != b):
            raise EvalError(f"{self.folder} holds another run's images ({changes}); choose another --out")
        known: dict[str, Any] = run.get("environments", {})
        self.maker = next((name for name, one in known.items() if one == environment), str(len(known) + 1))
        if self.maker not in known or longest != found.get(LISTING, ""):
            more = {LISTING: longest} if longest else {}
            run_file.update(self.folder, images=fingerprint | more, environments={self.maker: environment})

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

    def describe(self, settings: CommandSettings, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return what rows depend on: command, settings, and the environments that made their figures."""
        made = self._environments(rows)
        several = {"environments": made} if len(made) > 1 else {}
        return describe_run(settings, *made.values()) | several

    def mixture(self, rows: Sequence[Mapping[str, Any]]) -> str:
        """Return what is to be said of rows whose figures are not all of one maker and one batch size."""
        told, made = [], self._environments(rows)
        if len(made) > 1:
            named = [
                f"{name}: {one['device']}, commit {str(one['commit'])[:12]}, {one['threads']} threads"
                for name, one in made.items()
            ]
            told.append(
                f"The figures are not all of one program and machine ({'; '.join(named)}): in the rows "
                f"{', '.join(MAKERS)} say whose images, seconds, and memory and MACs are."
            )
        sizes = {row["timed_batch"] for row in rows if row.get("timed_batch")}
        if len(sizes) > 1:
            several = " and ".join(map(str, sorted(sizes)))
            told.append(f"Seconds are of batches of {several} images (timed_batch in the rows).")
        return "\n".join(told)

    def _environments(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        """The environments that made rows' figures, by their numbers."""
        named = [str(row[key]).split("+") for row in rows for key in MAKERS if row.get(key)]
        known = run_file.read(self.folder)["environments"]
        return {name: known[name] for name in sorted(set(chain.from_iterable(named)), key=int)}

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
                maker=self.maker,
                **self._timing(batch, len(specs), seconds, session),
            )
            entries.append(entry)
        self._append(method, entries)

    def save_time(
        self, method: Method, batch: int, entries: Sequence[Entry], seconds: Seconds, session: str
    ) -> None:
        """Write another time for a batch whose images, of these entries, are kept as they are."""
        change = self._timing(batch, len(entries), seconds, session)
        self._append(method, [entry.model_copy(update=change) for entry in entries])

    def _timing(self, batch: int, images: int, seconds: Seconds, session: str) -> dict[str, Any]:
        taken = {"seconds": seconds.wall, "cpu_seconds": seconds.cpu, "timed_by": self.maker}
        return {"batch": batch, "batch_images": images, "session": session, **taken}

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


def _digest(path: Path) -> str | None:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None
