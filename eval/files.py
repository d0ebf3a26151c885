"""Files that are whole or not there."""

import errno
import io
import os
import tempfile
import uuid
from contextlib import suppress
from pathlib import Path

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from .errors import EvalError

_SOFTWARE = "agentsd-eval"


def read_lines(path: Path) -> list[str]:
    """Return the lines of a text file that aren't blank. Raises EvalError if there is none."""
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except OSError as error:
        raise EvalError(f"can't read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise EvalError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start})") from None
    if not lines:
        raise EvalError(f"{path} is empty; it needs one entry a line")
    return lines


def image_files(folder: Path) -> list[Path]:
    """Return the images in a folder and below, sorted. Raises EvalError if there are fewer than 3."""
    suffixes = {".png", ".jpg", ".jpeg", ".webp", ".bmp"}
    files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in suffixes)
    if len(files) < 3:
        count = f"{len(files)} image{'s' * (len(files) != 1)}"
        raise EvalError(f"{folder} holds {count} (PNG, JPEG, WebP, BMP); a distance needs 3 or more")
    return files


def check_writable(path: Path, place: str = "--out") -> None:
    """Raise EvalError now if a file can't be written there, or its folder made. `place` chooses it."""
    try:
        # A name of its own, as several processes may look at once.
        with tempfile.TemporaryFile(dir=next(folder for folder in path.parents if folder.exists())):
            pass
    except OSError as error:
        raise explain_os_error(error, path, place) from error


def check_own_image(path: Path) -> None:
    """Raise EvalError now if an image would be written over a file that is none of this package's."""
    if not path.exists():
        return
    try:
        with Image.open(path) as image:
            own = image.info.get("Software") == _SOFTWARE
    except OSError:
        own = False
    if not own:
        raise EvalError(f"{path} was not made by this command and stays as it is; choose another --out")


def explain_os_error(error: OSError, path: Path, place: str = "--out") -> EvalError:
    """Return the error to show when `path` can't be written; it says what a full disk costs: nothing."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return EvalError(
            f"the disk is full: {path} was not written. Everything before it is safe; make room and run the "
            "same command again, it goes on from there."
        )
    return EvalError(f"can't write {path}: {error.strerror or error}; choose another place with {place}")


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file that is whole or not there: to a neighbour first, then renamed over `path`."""
    neighbour = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.part")  # folders may be shared
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with neighbour.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        neighbour.replace(path)
    except OSError as error:
        raise explain_os_error(error, path) from error
    finally:  # of Ctrl-C, too
        with suppress(OSError):  # its folder may not be one
            neighbour.unlink(missing_ok=True)


def save_image(image: Image.Image, path: Path) -> None:
    """Write a PNG that is whole or not there, and says whose it is."""
    made_by = PngInfo()
    made_by.add_text("Software", _SOFTWARE)
    write_bytes(path, png_bytes(image, made_by))


def png_bytes(image: Image.Image, info: PngInfo | None = None) -> bytes:
    """Return an image as PNG."""
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", pnginfo=info)
    return buffer.getvalue()
