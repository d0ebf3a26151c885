"""Warnings that are logged once."""

from __future__ import annotations

import logging
import re

_NUMBER = re.compile(r"\d+([.,]\d+)*")


class WarnOnce:
    """Logs each warning once, also if it comes again with other numbers.

    Args:
        logger: the logger of the module that warns.
    """

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._warned: set[str] = set()

    def __call__(self, message: str) -> None:
        """Log a message, unless it is empty or was logged before."""
        kind = _NUMBER.sub("#", message)
        if message and kind not in self._warned:
            self._warned.add(kind)
            self._logger.warning(f"agentsd: {message}")
