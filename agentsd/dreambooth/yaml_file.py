"""Reading a YAML file that anyone may have written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

_LARGEST = 1_000_000  # bytes of a file of settings


class _PlainLoader(yaml.SafeLoader):
    """YAML without aliases: nine lines of them can stand for a billion values."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark
            raise yaml.composer.ComposerError(None, None, "aliases (*name) are not read: write it out", mark)
        return super().compose_node(parent, index)


def parse(text: str) -> Any:
    """What YAML text without aliases holds; raises yaml.YAMLError or ValueError."""
    return yaml.load(text, _PlainLoader)


def read_mapping(path: Path) -> dict[Any, Any]:
    """What a YAML file of settings holds; an empty one holds nothing.

    Raises:
        OSError: it can't be read.
        ValueError: it is no YAML in UTF-8, or no mapping; the message is one line that names the file.
    """
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is no regular file: it can't hold settings")
    if path.is_file() and path.stat().st_size > _LARGEST:
        raise ValueError(f"{path} is larger than {_LARGEST:,} bytes: it is no file of settings")
    try:
        values = parse(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text (byte {error.start}): save it as UTF-8") from None
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply: write `name: value` lines") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"{path} is not valid YAML: {_told(error)}; write `name: value` lines") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds a {type(values).__name__}: write `name: value` lines")
    return values


def _told(error: Exception) -> str:
    """What is wrong and where, in a line."""
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return " ".join(str(error).split())
    return f"line {mark.line + 1}, column {mark.column + 1}: {getattr(error, 'problem', '')}"
