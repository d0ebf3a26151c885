"""What the plugin logs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def captured() -> Iterator[list[str]]:
    """The plugin's warnings while a block runs, in a list that fills; they are not printed."""
    messages: list[str] = []
    logger, handler = logging.getLogger("agentsd"), logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    propagate, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate
