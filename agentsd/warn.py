"""Warnings: each is logged once."""

from __future__ import annotations

import logging
import re

_NUMBER = re.compile(r"\d+([.,]\d+)*")


class WarnOnce:
    """Logs each kind of warning once: the same words, whatever the numbers.

    Args:
        logger: of the module that warns.
    """

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._warned: set[str] = set()

    def __call__(self, message: str) -> None:
        """Log it, unless it is empty or one of its kind was logged before."""
        kind = _NUMBER.sub("#", message)
        if message and kind not in self._warned:
            self._warned.add(kind)
            self._logger.warning(f"agentsd: {message}")
