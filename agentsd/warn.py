"""Warnings: each is logged once."""

from __future__ import annotations

import re

from diffusers.utils import logging

logger = logging.get_logger(__name__)
_NUMBER = re.compile(r"\d+([.,]\d+)*")


class WarnOnce:
    """Logs each kind of warning once: the same words, whatever the numbers."""

    def __init__(self) -> None:
        self._warned: set[str] = set()

    def __call__(self, message: str) -> None:
        """Log it, unless it is empty or one of its kind was logged before."""
        kind = _NUMBER.sub("#", message)
        if message and kind not in self._warned:
            self._warned.add(kind)
            logger.warning(f"agentsd: {message}")
