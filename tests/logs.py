"""What agentsd logs while a block runs."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager


class _Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@contextmanager
def logged() -> Iterator[list[str]]:
    """The messages, in a list that fills."""
    handler = _Messages()
    logging.getLogger("agentsd").addHandler(handler)
    try:
        yield handler.messages
    finally:
        logging.getLogger("agentsd").removeHandler(handler)


@contextmanager
def warned(match: str) -> Iterator[list[str]]:
    """At least one matches."""
    with logged() as messages:
        yield messages
    assert any(re.search(match, message) for message in messages), (match, messages)


@contextmanager
def silent(*but: str) -> Iterator[None]:
    """There is none but those that match."""
    with logged() as messages:
        yield
    assert not [text for text in messages if not any(re.search(match, text) for match in but)]
